"""What each kind of KV cache and each policy costs and saves, on SmolLM2 and real text.

Perplexity and greedy agreement against bf16 are teacher-forced on Python's reference manual: 1,024
tokens are the prompt, those after it are scored. `length` goes to four times the model's context.
`speed` and `batch` time decode steps of one sequence and of sixteen. Names are kv.POLICY.FIGURE.

    python bench/kv_policies.py [--quick] [--json FILE] [--parts LIST] [--docs]

Parts are quality, length, speed and batch; with --parts, what FILE holds of the others is kept.
--docs writes table and plots to docs/kv-cache.md.
"""

import json
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _common import Figure, Report, parser
from _kv_scoring import CHUNK, Kind, Score, Scorer, real_text, score
from _kv_variants import evicted_at_random, keys_scaled_per_token
from tokenizers import Tokenizer

from baton.engine.llm import LLM
from baton.engine.loader import load_model
from baton.engine.models.decoder import DecoderModel
from baton.engine.sampling_params import BeamParams, SamplingParams
from baton.engine.sequence import Sequence
from baton.store import resolve

KINDS = (
    Kind("bf16"),
    Kind("fp8", "fp8"),
    Kind("int8", "int8"),
    Kind("int4", "int4"),
    Kind("streaming", policy="streaming(sinks=4,window=512)"),
    Kind("snapkv", policy="snapkv(budget=0.25)"),
    Kind("h2o", policy="h2o(budget=0.25)"),
    Kind("snapkv_int8", "int8", "snapkv(budget=0.25)"),
)
PARTS = "quality,length,speed,batch"
PROMPT = 1024
POOL_BYTES = 512 << 20
POOL_TOKENS = 4096


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--parts", default=PARTS)
    arguments.add_argument("--docs", action="store_true", help="write docs/kv-cache.md")
    options = arguments.parse_args()
    path = resolve("smollm2").path
    model, _ = load_model(path)
    tokens = real_text(Tokenizer.from_file(str(path / "tokenizer.json")))
    report = Report("KV policies")
    parts = options.parts.split(",")
    if options.json and options.json.is_file() and options.parts != PARTS:
        report.figures = [Figure(**f) for f in json.loads(options.json.read_text())["figures"]]
    with torch.inference_mode():
        if "quality" in parts:
            _sizes(report, model)
            _quality(report, model, tokens, options.quick)
        if "length" in parts:
            _length(report, model, tokens, options.quick)
    if "speed" in parts:
        _speed(report, path, tokens, 1, 1024, options.quick)
        _beams(report, path, tokens)
    if "batch" in parts:
        _speed(report, path, tokens, 16, 512, options.quick)
    last = {figure.name: figure for figure in report.figures}
    report.figures = list(last.values())
    report.finish(options.json)
    if options.docs:
        from _kv_docs import write

        write(last, KINDS)


def _sizes(report: Report, model: DecoderModel) -> None:
    """Of one sequence of 4,096 tokens, all of them prompt: what it holds and what is shipped. The
    newest tokens of a quantized cache, a constant, count only in how many sequences fit."""
    held: dict[str, tuple[int, int, int]] = {}
    for kind in KINDS:
        scorer = Scorer(model, kind, 600)
        seq = scorer.start([1] * POOL_TOKENS, POOL_TOKENS)
        kept = kind.kv_policy.kept(POOL_TOKENS, POOL_TOKENS, 16)
        block_bytes = kind.layout(model).bytes_per_block
        states = len(seq.tail_blocks) if kind.kv_policy.keeps_state else 0
        blocks = -(-kept // 16)
        counts = (blocks + states, len(seq.handoff_positions(16)), blocks + len(seq.tail_blocks))
        held[kind.name] = tuple(count * block_bytes for count in counts)  # type: ignore[assignment]
    full_bytes, full_wire, _ = held["bf16"]
    for name, (num_bytes, wire, whole) in held.items():
        report.add(f"kv.{name}.bytes_per_token", num_bytes / POOL_TOKENS, "B")
        report.add(f"kv.{name}.bytes_share", num_bytes / full_bytes, "share")
        report.add(f"kv.{name}.wire_share", wire / full_wire, "share")
        report.add(f"kv.{name}.sequences", POOL_BYTES // whole, "in 512 MiB")


def _quality(report: Report, model: DecoderModel, tokens: list[int], quick: bool) -> None:
    """Kinds without a policy differ by little from bf16, so they are measured on more excerpts."""
    scored, count = (64, 2) if quick else (384, 24)
    length = PROMPT + scored + 1
    stride = len(tokens) // count
    texts = [tokens[i * stride : i * stride + length] for i in range(count)]
    few = texts[::3]

    def measure(kind: Kind, texts: list[list[int]]) -> Score:
        return score(Scorer(model, kind, len(texts) * 220), texts, PROMPT, PROMPT - 1)

    full = measure(KINDS[0], texts)
    report.add("kv.bf16.perplexity", full.perplexity, "")
    full_of_few = Score(full.logprobs[::3], full.best[::3])
    for kind in KINDS[1:]:
        if kind.kv_policy.is_full:
            _compare(report, kind.name, measure(kind, texts), full)
        else:
            _compare(report, kind.name, measure(kind, few), full_of_few)
    with keys_scaled_per_token(model):
        _compare(report, "int4_token_keys", measure(Kind("", "int4"), few), full_of_few)
    with evicted_at_random():
        random = Kind("", policy="snapkv(budget=0.25)")
        _compare(report, "random", measure(random, few), full_of_few)
    _next_tokens(report, model, few)


def _compare(report: Report, name: str, ours: Score, full: Score) -> None:
    report.add(f"kv.{name}.ppl_change", ours.perplexity / full.perplexity - 1, "share")
    report.add(f"kv.{name}.agreement", float((ours.best == full.best).double().mean()), "share")


def _next_tokens(report: Report, model: DecoderModel, texts: list[list[int]]) -> None:
    """Divergence, from the full cache, of the first 16 distributions after the prompt's own."""

    def first(kind: Kind) -> torch.Tensor:
        short = [text[: PROMPT + 16] for text in texts]
        scorer = Scorer(model, kind, 200 * len(texts))
        return torch.cat([logits for _, _, logits in scorer.logits(short, PROMPT, PROMPT)])

    full = first(KINDS[0]).log_softmax(-1)

    def divergence(kind: Kind) -> float:
        other = first(kind).log_softmax(-1)
        return float((full.exp() * (full - other)).sum(-1).mean())

    snapkv = Kind("", policy="snapkv(budget=0.25)")
    report.add("kv.snapkv.next_token_kl", divergence(snapkv), "nat")
    with evicted_at_random():
        report.add("kv.random.next_token_kl", divergence(snapkv), "nat")


def _length(report: Report, model: DecoderModel, tokens: list[int], quick: bool) -> None:
    """One text of four times the context; perplexity of its last part, where an in-context model
    has between half and all of its context before it."""
    context = CHUNK * 2 if quick else model.config.max_position_embeddings
    length, scored = 4 * context, context // 2
    text = (tokens * (1 + length // len(tokens)))[: length + 1]
    window = context // 4
    report.add("kv.length.tokens", length, "")
    in_context = text[-(context + 1) :]
    full = score(Scorer(model, KINDS[0], context // 16 + 8), [in_context], 1, context - scored)
    report.add("kv.in_context.perplexity", full.perplexity, "")
    for name, sinks in (("streaming", 4), ("window_only", 0)):
        policy = Kind("", policy=f"streaming(sinks={sinks},window={window - sinks})")
        blocks = -(-(window + CHUNK) // 16) + 8
        far = score(Scorer(model, policy, blocks), [text], 1, length - scored)
        report.add(f"kv.{name}.ppl_at_4x", far.perplexity, "")
        report.add(f"kv.{name}.vs_in_context", far.perplexity / full.perplexity, "x")


def _speed(
    report: Report, path: Path, tokens: list[int], batch: int, prompt: int, quick: bool
) -> None:
    """Milliseconds per decode step, of all kinds in turn: a busy machine slows all alike."""
    steps, rounds = (4, 2) if quick else (8, 3)
    texts = [tokens[i * 5000 : i * 5000 + prompt] for i in range(batch)]
    with mock.patch("baton.engine.llm.load_model", _shared(path)):
        rivals = {kind.name: Stepping(path, kind, texts) for kind in KINDS}
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, rival in rivals.items():
            seconds[name] += [rival.step() for _ in range(steps)]
    full = statistics.median(seconds["bf16"])
    suffix = "" if batch == 1 else f"_b{batch}"
    for name, mine in seconds.items():
        ours = statistics.median(mine)
        report.add(f"kv.{name}.tpot_ms{suffix}", 1e3 * ours, "ms")
        report.add(f"kv.{name}.tpot_ratio{suffix}", ours / full, "x")


class Stepping:
    """Sequences that have been prefilled and now decode."""

    def __init__(self, path: Path, kind: Kind, texts: list[list[int]]) -> None:
        blocks = len(texts) * (-(-len(texts[0]) // 16) * 2 + 24)
        self._engine = LLM(
            path, num_blocks=blocks, kv_dtype=kind.kv_dtype, kv_policy=kind.policy
        ).engine
        sampling = SamplingParams(temperature=0.0, max_tokens=10**4 // 16, ignore_eos=True)
        config = self._engine.scheduler.config
        for text in texts:
            seq = Sequence(text, sampling, kv_dtype=config.kv_dtype, kv_policy=config.kv_policy)
            self._engine.add(seq)
        running = self._engine.scheduler.running
        while len(running) < len(texts) or any(seq.num_uncomputed_tokens > 1 for seq in running):
            self._engine.step()

    def step(self) -> float:
        outputs = self._engine.step()
        assert outputs is not None and outputs[0].progress is not None
        step = outputs[0].progress.step
        return step.end - step.start


def _beams(report: Report, path: Path, tokens: list[int]) -> None:
    """Most blocks held by a search of 4 beams over one sequence's, after 512 prompt tokens."""
    most = {}
    for width in (1, 4):
        with mock.patch("baton.engine.llm.load_model", _shared(path)):
            llm = LLM(path, num_blocks=256)
        beam = BeamParams(width) if width > 1 else None
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, beam=beam)
        blocks = llm.engine.blocks
        most[width] = 0
        with mock.patch.object(blocks, "allocate", _watched(blocks, most, width)):
            llm.generate([tokens[:512]], sampling)
    report.add("kv.beam4.blocks_ratio", most[4] / most[1], "x")


def _watched(blocks: Any, most: dict[int, int], width: int) -> Any:
    allocate = blocks.allocate

    def watched(count: int) -> list[int]:
        taken: list[int] = allocate(count)
        most[width] = max(most[width], blocks.num_blocks - blocks.num_free)
        return taken

    return watched


def _shared(path: Path) -> Any:
    loaded = load_model(path)
    return lambda *_: loaded


if __name__ == "__main__":
    main()
