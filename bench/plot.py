"""Plots as SVG, by the standard library alone. Pure: values in, text out; the same values give the same text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from bench.stats import Figure

COLOURS: Final = {
    "ours": "#0072b2",
    "binaries": "#56b4e9",
    "bare": "#777777",
    "base": "#cc79a7",
    "peer": "#d55e00",
}
"""One colour for a side in every plot; told apart by those who do not see all colours (Okabe and Ito)."""

_OTHERS: Final = ("#009e73", "#e69f00", "#000000")
_DARK: Final = {
    "#ffffff": "#0d1117",
    "#222222": "#e6edf3",
    "#555555": "#9198a1",
    "#e4e4e4": "#30363d",
    "#0072b2": "#58a6ff",
    "#56b4e9": "#8fd3ff",
    "#777777": "#a0a8b0",
    "#cc79a7": "#e39ac2",
    "#d55e00": "#f0883e",
    "#009e73": "#3fb98f",
    "#e69f00": "#f2c14e",
    "#000000": "#ffffff",
}
"""The colours on dark pages. A browser applies the colour scheme of the page that shows the plot."""
_WIDTH: Final = 760
_LEFT: Final = 190
_RIGHT: Final = 80


@dataclass(frozen=True)
class Group:
    """Rows that belong together."""

    name: str
    rows: Sequence[tuple[str, Figure]]
    """Side and figure."""


@dataclass(frozen=True)
class Line:
    """One side's figures, by what grows."""

    name: str
    points: Sequence[tuple[float, Figure]]


def dots(title: str, axis: str, groups: Sequence[Group]) -> str:
    """A dot with its interval for each row, on a logarithmic axis."""
    rows = [figure for group in groups for _, figure in group.rows]
    scale = _Scale([bound for figure in rows for bound in (figure.low, figure.high)], _LEFT, _WIDTH - _RIGHT)
    parts: list[str] = []
    y = 56.0
    for group in groups:
        parts.append(_text(12, y + 4, group.name, "start", bold=True))
        for name, figure in group.rows:
            x = scale(figure.value)
            parts.append(_text(_LEFT - 12, y + 4, name, "end"))
            parts.append(
                f'<line x1="{scale(figure.low):.1f}" x2="{scale(figure.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{_colour(name)}" stroke-width="2"/>'
            )
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{_colour(name)}"/>')
            parts.append(_text(scale(figure.high) + 9, y + 4, _number(figure.value), "start"))
            y += 18
        y += 12
    ticks = [
        f'<line x1="{scale(tick):.1f}" x2="{scale(tick):.1f}" y1="40" y2="{y - 12:.1f}" stroke="#e4e4e4"/>'
        + _text(scale(tick), y + 4, _number(tick), "middle")
        for tick in scale.ticks
    ]
    return _document(title, axis, y + 30, [*ticks, *parts])


def lines(title: str, axis: str, across: str, found: Sequence[Line]) -> str:
    """A line for each side; both axes are logarithmic. `across` says what grows."""
    height, top = 300.0, 56.0
    xs = _Scale([x for line in found for x, _ in line.points], 60, _WIDTH - 170)
    ys = _Scale([figure.value for line in found for _, figure in line.points], height, top)
    parts: list[str] = []
    for tick in ys.ticks:
        parts.append(f'<line x1="60" x2="{_WIDTH - 170}" y1="{ys(tick):.1f}" y2="{ys(tick):.1f}" stroke="#e4e4e4"/>')
        parts.append(_text(52, ys(tick) + 4, _number(tick), "end"))
    for x in sorted({x for line in found for x, _ in line.points}):
        parts.append(_text(xs(x), height + 22, f"{x:,.0f}", "middle"))
    labels: list[float] = []
    for line in sorted(found, key=lambda line: ys(line.points[-1][1].value)):
        colour = _colour(line.name, [other.name for other in found])
        points = " ".join(f"{xs(x):.1f},{ys(figure.value):.1f}" for x, figure in line.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{xs(x):.1f}" cy="{ys(figure.value):.1f}" r="4" fill="{colour}"/>' for x, figure in line.points
        ]
        x, last = line.points[-1]
        # Names do not cover each other.
        labels.append(max(ys(last.value) + 4, labels[-1] + 15 if labels else 0))
        parts.append(_text(xs(x) + 12, labels[-1], f"{line.name} {_number(last.value)}", "start", colour=colour))
    return _document(title, f"{axis}; {across} on the axis across", height + 50, parts)


class _Scale:
    """Values to places, by their logarithm, with room on both ends."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = min(values) / 1.15, max(values) * 1.15
        self._low, self._span = math.log(low), math.log(high) - math.log(low)
        self._first, self._last = first, last
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        self.ticks = [
            tick for decade in decades for digit in (1, 2, 5) if low <= (tick := digit * 10.0**decade) <= high
        ]

    def __call__(self, value: float) -> float:
        return self._first + (math.log(value) - self._low) / self._span * (self._last - self._first)


def _colour(name: str, names: Sequence[str] = ()) -> str:
    first = name.split()[0].rstrip(",")
    unknown = [other for other in names if other.split()[0].rstrip(",") not in COLOURS]
    return COLOURS.get(first) or _OTHERS[unknown.index(name) % len(_OTHERS) if name in unknown else 0]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False, colour: str = "#222222") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'


def _document(title: str, axis: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12">'
    )
    heading = [_text(12, 20, title, "start", bold=True), _text(12, 36, axis, "start", colour="#555555")]
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    drawing = "\n".join([background, *heading, *parts])
    return "\n".join([head, f"<title>{escape(title)}</title>", _dark(drawing), drawing, "</svg>", ""])


def _dark(drawing: str) -> str:
    """The rules for dark pages, of the colours that the drawing has; programs without CSS draw the light colours."""
    rules = [
        f'[{attribute}="{light}"]{{{attribute}:{dark}}}'
        for attribute in ("fill", "stroke")
        for light, dark in _DARK.items()
        if f'{attribute}="{light}"' in drawing
    ]
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
