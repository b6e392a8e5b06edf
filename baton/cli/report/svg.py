"""Small charts as SVG text: lines over time, bars, ranges, a waterfall. No scripts, no fonts.

Colours come from the page's CSS variables, so charts follow its light or dark scheme. Each chart
has a title that screen readers say.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape

WIDTH, ROW, LEFT, RIGHT = 640, 22, 150, 100
AXIS = 75
HEIGHT = 200
COLOURS = tuple(f"var(--c{index})" for index in range(6))
Points = Sequence[tuple[float, float]]


def lines(
    title: str, series: Mapping[str, Points], unit: str = "", top: float | None = None
) -> str:
    """Points are (Unix seconds, value)."""
    points = [point for each in series.values() for point in each]
    if not points:
        return _empty(title)
    start, end = min(x for x, _ in points), max(x for x, _ in points)
    highest = top or _nice(max(y for _, y in points))
    width, height = WIDTH - AXIS - 10, HEIGHT - 40

    def place(x: float, y: float) -> str:
        across = (x - start) / (end - start) if end > start else 0.5
        return f"{AXIS + across * width:.1f},{height + 10 - min(y / highest, 1) * height:.1f}"

    body = _grid(highest, unit, height, width)
    for colour, (name, each) in zip(_cycle(len(series)), series.items(), strict=True):
        if len(each) == 1:
            x, y = place(*each[0]).split(",")
            body += f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
        elif each:
            path = " ".join(place(*point) for point in each)
            body += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2">'
            body += f"<title>{escape(name)}</title></polyline>"
    for edge, anchor, at in ((AXIS, "start", start), (WIDTH - 10, "end", end)):
        body += f'<text x="{edge}" y="{HEIGHT - 6}" text-anchor="{anchor}">{_clock(at)}</text>'
    return _figure(title, body, HEIGHT, list(series))


def bars(title: str, rows: Mapping[str, float], unit: str = "") -> str:
    if not rows:
        return _empty(title)
    highest = max(rows.values()) or 1.0
    body = ""
    for index, (name, value) in enumerate(rows.items()):
        length = value / highest * (WIDTH - LEFT - RIGHT)
        body += _label(index, name)
        body += _bar(index, LEFT, length, COLOURS[0], f"{name}: {value:,.2f}{unit}")
        body += _value(index, LEFT + length, f"{short(value)}{unit}")
    return _figure(title, body, ROW * len(rows) + 8)


def ranges(title: str, rows: Mapping[str, Mapping[str, float]], unit: str = " ms") -> str:
    """p50 to p99 as a bar on a logarithmic scale, with a mark at p90."""
    rows = {name: row for name, row in rows.items() if row.get("count") and row["p99"] > 0}
    if not rows:
        return _empty(title)
    low = min(max(row["p50"], row["p99"] / 1e4, 1e-4) for row in rows.values())
    high = max(row["p99"] for row in rows.values())
    span = math.log(high / low) or 1.0

    def place(value: float) -> float:
        inside = math.log(max(value, low) / low) / span
        return LEFT + inside * (WIDTH - LEFT - 1.5 * RIGHT)

    body = ""
    for index, (name, row) in enumerate(rows.items()):
        start, end = place(row["p50"]), place(row["p99"])
        told = f"{name}: p50 {row['p50']:,.2f}, p90 {row['p90']:,.2f}, p99 {row['p99']:,.2f}{unit}"
        body += _label(index, name)
        body += _bar(index, start, max(end - start, 2), COLOURS[0], told)
        mark = place(row["p90"])
        body += (
            f'<rect x="{mark:.1f}" y="{index * ROW + 6}" width="2" height="14" fill="var(--ink)"/>'
        )
        body += _value(index, end, f"{short(row['p50'])} – {short(row['p99'])}{unit}")
    return _figure(title + " (p50 to p99, mark at p90, log scale)", body, ROW * len(rows) + 8)


def waterfall(title: str, rows: Mapping[str, float], unit: str = " ms") -> str:
    """Each bar begins where the one before ended."""
    total = sum(rows.values())
    if not total:
        return _empty(title)
    body, at, scale = "", 0.0, (WIDTH - LEFT - RIGHT) / total
    for index, (name, value) in enumerate(rows.items()):
        colour = COLOURS[index % len(COLOURS)]
        told = f"{name}: {value:,.2f}{unit}"
        body += _label(index, name)
        body += _bar(index, LEFT + at * scale, max(value * scale, 1), colour, told)
        body += _value(index, LEFT + (at + value) * scale, f"{short(value)}{unit}")
        at += value
    return _figure(title, body, ROW * len(rows) + 8)


def short(value: float) -> str:
    """Three digits, never an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}" if 0 < abs(value) < 0.1 else f"{value:,.3g}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")


def _figure(title: str, body: str, height: int, legend: Sequence[str] = ()) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for colour, name in zip(_cycle(len(legend)), legend, strict=True)
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{body}</svg>'
        f"<div>{keys}</div></figure>"
    )


def _empty(title: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption><p>Nothing was seen.</p></figure>"


def _grid(highest: float, unit: str, height: int, width: int) -> str:
    body = ""
    for part in range(5):
        y = height + 10 - height * part / 4
        body += f'<path d="M{AXIS} {y:.1f}h{width}" stroke="var(--line)"/>'
        shown = f"{short(highest * part / 4)}{unit}"
        body += f'<text x="{AXIS - 5}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>'
    return body


def _label(index: int, name: str) -> str:
    return f'<text x="{LEFT - 8}" y="{index * ROW + 17}" text-anchor="end">{escape(name)}</text>'


def _value(index: int, x: float, shown: str) -> str:
    return f'<text x="{x + 5:.1f}" y="{index * ROW + 17}">{escape(shown)}</text>'


def _bar(index: int, x: float, length: float, colour: str, told: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{index * ROW + 5}" width="{length:.1f}" height="16" '
        f'fill="{colour}"><title>{escape(told)}</title></rect>'
    )


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _nice(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.999)
