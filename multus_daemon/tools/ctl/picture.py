"""SVG of `multusctl graph --svg`: three columns for bridges, networks and pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from xml.sax.saxutils import escape

ROW: Final = 30
"""Distance of two boxes in pixels."""
COLUMNS: Final = (20, 240, 560)
"""Left edge of each column."""
WIDTHS: Final = (180, 280, 420)
BOX: Final = 22
COLOURS: Final = ("#0072b2", "#009e73", "#555555")
_STYLE: Final = """
text { font: 12px ui-monospace, monospace; fill: #111 }
rect { fill: #fff; stroke-width: 1.5 }
path { fill: none; stroke: #999 }
@media (prefers-color-scheme: dark) { text { fill: #eee } rect { fill: #1c1c1c } }
"""


def svg(found: Mapping[str, Any]) -> str:
    """Draw the tree of `diagnosis.attachments.graph`."""
    boxes: list[str] = []
    lines: list[str] = []
    row = 0
    for parent in found["parents"]:
        first_of_parent = row
        middles: list[float] = []
        for network in parent["networks"]:
            first = row
            for item in network["interfaces"]:
                who = item["pod"] or item["container"][:13]
                boxes.append(_box(2, row, f"{who}  {item['interface']}  {' '.join(item['addresses'])}"))
                row += 1
            middle = (first + row - 1) / 2
            middles.append(middle)
            boxes.append(_box(1, middle, f"{network['name']}  ({network['plugin']})"))
            lines += [_line(1, middle, 2, below) for below in range(first, row)]
        at = (first_of_parent + row - 1) / 2
        boxes.append(_box(0, at, parent["name"] or "routed"))
        lines += [_line(0, at, 1, middle) for middle in middles]
    height = max(row, 1) * ROW + 20
    width = COLUMNS[2] + WIDTHS[2] + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><title>networks of this node</title><style>{_STYLE}</style>\n'
        + "\n".join([*lines, *boxes])
        + "\n</svg>\n"
    )


def _box(column: int, row: float, text: str) -> str:
    x, y, width = COLUMNS[column], 10 + row * ROW, WIDTHS[column]
    # Monospace at 12 px: about 7.3 px a character.
    most = int((width - 16) / 7.3)
    shown = text if len(text) <= most else text[: most - 1] + "…"
    return (
        f'<g><title>{escape(text)}</title><rect x="{x}" y="{y:.1f}" width="{width}" height="{BOX}" rx="4" '
        f'stroke="{COLOURS[column]}"/><text x="{x + 8}" y="{y + 15:.1f}">{escape(shown)}</text></g>'
    )


def _line(left: int, upper: float, right: int, lower: float) -> str:
    start, end = COLUMNS[left] + WIDTHS[left], COLUMNS[right]
    middle = (start + end) / 2
    y1, y2 = (10 + row * ROW + BOX / 2 for row in (upper, lower))
    return f'<path d="M{start} {y1:.1f} C{middle} {y1:.1f} {middle} {y2:.1f} {end} {y2:.1f}"/>'
