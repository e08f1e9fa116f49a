"""Charts as inline SVG, drawn 340 units wide so that their text can be read on a phone. Knows numbers and labels.

Colours come from the page's style sheet by class, so that a chart follows the reader's light or dark.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 340
_ROW: Final = 30
_TICKS: Final = 4
_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class Range:
    """A labelled value with its interval, where it has one."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None


def position_bars(joint: Sequence[float | None], conditional: Sequence[float | None]) -> str:
    """A row per position: a filled bar for the joint rate, an outlined one for the conditional."""
    rates = zip(joint, conditional, strict=True)
    rows = [_position(i, *both, y=22 + i * _ROW) for i, both in enumerate(rates)]
    head = _text(28, 12, "position", kind="small") + _text(WIDTH, 12, "joint / conditional", kind="small", anchor="end")
    shown = ", ".join(f"{i} {_percent(rate)}" for i, rate in enumerate(joint, start=1))
    return _svg(f"{head}{''.join(rows)}", height=24 + len(rows) * _ROW, label=f"joint rates by position: {shown}")


def histogram(values: Sequence[float], *, mark: float | None) -> str:
    """How many of `values` (at least one) lie in each bin of equal width, with a line at `mark`."""
    edges = _edges(min(values), max(values), _BINS)
    step = edges[1] - edges[0]
    # Values are placed by number of steps: an edge that rounding moved would put a value on its other side.
    places = [min(int((v - edges[0]) / step + 1e-9), len(edges) - 2) for v in values]
    counts = [places.count(i) for i in range(len(edges) - 1)]
    bottom, tallest, wide = 130, max(counts), (WIDTH - 20) / len(counts)
    parts = [_bin(10 + i * wide, wide, count, bottom - 100 * count / tallest, bottom) for i, count in enumerate(counts)]
    parts += [
        _text(10 + i * wide, bottom + 15, f"{edge:.3g}", kind="small", anchor="middle") for i, edge in _every(edges)
    ]
    parts.append(f'<line class="axis" x1="10" x2="{WIDTH - 10}" y1="{bottom}" y2="{bottom}"/>')
    if mark is not None:
        x = 10 + (mark - edges[0]) / step * wide
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{bottom}"/>')
    return _svg("".join(parts), height=152, label=f"{len(values)} prompts, from {min(values):.3g} to {max(values):.3g}")


def ranges(rows: Sequence[Range], *, show: Callable[[float], str], band: tuple[float, float] | None = None) -> str:
    """A row per range: its label and value in words, and below them a dot on its interval.

    `band` is shaded behind the rows, as what is tolerated.
    """
    known = [v for r in rows for v in (r.value, r.low, r.high) if v is not None] + list(band or ())
    if not known:
        return ""
    edges = _edges(min(known), max(known), _TICKS)
    first, last, bottom = edges[0], edges[-1], len(rows) * 44 + 8

    def across(value: float) -> float:
        return 12 + (value - first) / (last - first) * (WIDTH - 24)

    parts = []
    if band:
        left, right = across(band[0]), across(band[1])
        parts.append(f'<rect class="band" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{bottom}"/>')
    parts += [_ruled(across(edge), bottom, show(edge)) for edge in edges]
    parts += [_range(r, i * 44, across, show) for i, r in enumerate(rows)]
    said = "; ".join(f"{r.label} {'none' if r.value is None else show(r.value)}" for r in rows)
    return _svg("".join(parts), height=bottom + 20, label=said)


def _position(index: int, joint: float | None, conditional: float | None, *, y: float) -> str:
    name = _text(0, y + 13, str(index + 1))
    if joint is None:
        return name + _text(28, y + 13, "never proposed", kind="small")
    track = 200
    inner = f'<rect class="bar" x="28" y="{y}" width="{track * joint:.1f}" height="11"/>'
    if conditional is not None:
        inner += f'<rect class="outline" x="28" y="{y + 12}" width="{track * conditional:.1f}" height="7"/>'
    return name + inner + _text(WIDTH, y + 13, f"{_percent(joint)} / {_percent(conditional)}", anchor="end")


def _bin(left: float, wide: float, count: int, top: float, bottom: float) -> str:
    if not count:
        return ""
    bar = f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{wide - 2:.1f}" height="{bottom - top:.1f}"/>'
    return bar + _text(left + wide / 2, top - 4, str(count), kind="small", anchor="middle")


def _range(row: Range, top: float, across: Callable[[float], float], show: Callable[[float], str]) -> str:
    said = "none" if row.value is None else show(row.value)
    if row.low is not None and row.high is not None:
        said += f" ({show(row.low)} to {show(row.high)})"
    parts = [_text(12, top + 16, _short(row.label)), _text(WIDTH - 12, top + 16, said, anchor="end")]
    if row.low is not None and row.high is not None:
        left, right, y = across(row.low), across(row.high), top + 30
        parts.append(f'<line class="whisker" x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>')
    if row.value is not None:
        parts.append(f'<circle class="dot" cx="{across(row.value):.1f}" cy="{top + 30}" r="5"/>')
    return "".join(parts)


def _ruled(x: float, bottom: float, label: str) -> str:
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>'
    anchor = "start" if x < 30 else "end" if x > WIDTH - 30 else "middle"
    return line + _text(x, bottom + 15, label, kind="small", anchor=anchor)


def _edges(low: float, high: float, count: int) -> list[float]:
    """At most `count` + 1 round steps that hold `low` and `high`, two at least."""
    spread = high - low or abs(low) * 0.1 or 1.0
    magnitude = 10 ** math.floor(math.log10(spread / count))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude * count >= spread * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [i * step for i in range(first, last + 1)]


def _every(edges: Sequence[float]) -> list[tuple[int, float]]:
    """Those edges whose labels have room beside each other."""
    apart = math.ceil(len(edges) / 6)
    return [(i, edge) for i, edge in enumerate(edges) if i % apart == 0]


def _percent(rate: float | None) -> str:
    return "none" if rate is None else f"{100 * rate:.1f} %"


def _short(text: str, limit: int = 24) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _text(x: float, y: float, text: str, *, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(inner: str, *, height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{inner}</svg>'
