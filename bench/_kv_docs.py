"""Writes the table of docs/kv-cache.md and its plots from measured figures."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from _common import Figure
from _kv_scoring import Kind

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COLUMNS = (
    ("bytes_per_token", "B per token", "{:,.0f}"),
    ("bytes_share", "of bf16", "{:.3f}"),
    ("sequences", "sequences of 4,096 in 512 MiB", "{:.0f}"),
    ("wire_share", "shipped, of bf16", "{:.3f}"),
    ("ppl_change", "perplexity", "{:+.2%}"),
    ("agreement", "greedy agreement", "{:.1%}"),
    ("tpot_ratio", "TPOT of bf16, batch 1", "{:.2f}x"),
    ("tpot_ratio_b16", "batch 16", "{:.2f}x"),
)


def write(figures: Mapping[str, Figure], kinds: Sequence[Kind]) -> None:
    page = DOCS / "kv-cache.md"
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text:
        raise SystemExit(f"{page} has no line {BEGIN}")
    table = "\n".join([BEGIN, "", *_table(figures, kinds), "", END])
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    page.write_text(re.sub(pattern, lambda _: table, text, flags=re.DOTALL), encoding="utf-8")
    _memory_plot(figures, kinds)
    _length_plot(figures)


def _table(figures: Mapping[str, Figure], kinds: Sequence[Kind]) -> list[str]:
    lines = [
        "| | " + " | ".join(title for _, title, _ in COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for kind in kinds:
        cells = []
        for name, _, form in COLUMNS:
            figure = figures.get(f"kv.{kind.name}.{name}")
            cells.append("" if figure is None else form.format(figure.value))
        label = " ".join(w for w in (kind.kv_dtype, kind.policy) if w not in ("auto", "full"))
        lines.append(f"| {label or 'bf16'} | " + " | ".join(cells) + " |")
    return lines


def _memory_plot(figures: Mapping[str, Figure], kinds: Sequence[Kind]) -> None:
    """Perplexity lost over memory kept, of one sequence."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for kind, mark in zip(kinds[1:], "osD^vPX", strict=True):
        share = figures[f"kv.{kind.name}.bytes_share"].value
        change = 100 * figures[f"kv.{kind.name}.ppl_change"].value
        axes.plot(share, change, mark, label=kind.name)
    axes.set_xlabel("bytes of a cache of 4,096 tokens, of bf16")
    axes.set_ylabel("perplexity, % above bf16")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlim(0, 0.7)
    axes.set_ylim(-0.5, 50)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, "kv-memory.png")


def _length_plot(figures: Mapping[str, Figure]) -> None:
    """Perplexity at four times the context."""
    bars = {
        "in context": "kv.in_context.perplexity",
        "sinks and window": "kv.streaming.ppl_at_4x",
        "window alone": "kv.window_only.ppl_at_4x",
    }
    figure, axes = plt.subplots(figsize=(6, 2.6))
    values = [figures[name].value for name in bars.values()]
    shown = axes.barh(list(bars), values)
    axes.bar_label(shown, fmt="%.1f", padding=3)
    axes.set_xscale("log")
    axes.set_xlim(1, 4 * max(values))
    axes.set_xlabel("perplexity at four times the model's context")
    axes.invert_yaxis()
    _save(figure, "kv-length.png")


def _save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(DOCS / "images" / name, dpi=110)
    plt.close(figure)
