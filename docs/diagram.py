"""Draw the picture of the README: how a pod comes to its interfaces. One file for light and one for dark pages.

python docs/diagram.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

FOLDER: Final = Path(__file__).resolve().parent / "diagram"
TITLE: Final = "How a pod comes to its interfaces"
_WIDTH: Final = 880
_HEIGHT: Final = 330


@dataclass(frozen=True)
class Palette:
    """Colours as SVG has them."""

    page: str
    text: str
    faint: str
    box: str
    own: str
    """Of this project's two programs."""
    line: str
    networks: tuple[str, str, str]
    """Of the pod's interfaces."""


PALETTES: Final = {
    "light": Palette(
        "#ffffff", "#1f2328", "#57606a", "#f6f8fa", "#ddf4ff", "#57606a", ("#57606a", "#0072b2", "#b35900")
    ),
    "dark": Palette(
        "#0d1117", "#e6edf3", "#9198a1", "#161b22", "#0c2d4a", "#9198a1", ("#9198a1", "#58a6ff", "#f0983b")
    ),
}


def main() -> None:
    """Write both."""
    FOLDER.mkdir(exist_ok=True)
    for name, palette in PALETTES.items():
        (FOLDER / f"{name}.svg").write_text(drawn(palette))


def drawn(palette: Palette) -> str:
    """The picture."""
    pen = _Pen(palette)
    storage, fast = palette.networks[1], palette.networks[2]
    parts = [
        # The way of a call.
        *pen.box(12, 140, 136, 62, "runtime", ["containerd, CRI-O"]),
        *pen.arrow((148, 171), (204, 171), "exec"),
        *pen.box(204, 140, 134, 62, "multus-shim", ["one for each call"], own=True),
        *pen.arrow((338, 171), (404, 171), "socket"),
        *pen.box(404, 110, 240, 200, "multus-daemon", ["one for each node"], own=True),
        *pen.box(420, 168, 208, 58, "built-in plugins", ["bridge, ptp, macvlan, ..."]),
        *pen.box(420, 238, 208, 58, "the node's plugins", ["sriov, whereabouts, ..."]),
        # What it knows, and tells.
        *pen.box(384, 14, 280, 54, "API server", ["pods, NetworkAttachmentDefinitions"]),
        *pen.arrow((464, 68), (464, 110), "watch", side="left"),
        *pen.arrow((584, 110), (584, 68), "network-status", side="right"),
        # What comes of it.
        *pen.box(724, 110, 136, 200, "pod", []),
    ]
    for number, (name, network) in enumerate((("eth0", "cluster network"), ("net1", "storage"), ("net2", "fast"))):
        y = 166 + 50 * number
        colour = (palette.networks[0], storage, fast)[number]
        parts += pen.arrow((644, y), (738, y), "", colour=colour)
        parts += pen.interface(738, y - 17, name, network, colour)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="system-ui, sans-serif" font-size="13">'
    )
    page = f'<rect width="100%" height="100%" rx="8" fill="{palette.page}"/>'
    return "\n".join([head, f"<title>{escape(TITLE)}</title>", page, *parts, "</svg>", ""])


class _Pen:
    def __init__(self, palette: Palette) -> None:
        self._palette = palette

    def box(
        self, x: int, y: int, width: int, height: int, title: str, lines: Sequence[str], *, own: bool = False
    ) -> list[str]:
        """A rectangle with its name and what there is to say, from its top."""
        fill = self._palette.own if own else self._palette.box
        middle = x + width // 2
        return [
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
            f'stroke="{self._palette.line}"/>',
            self._text(middle, y + 25, title, bold=True),
            *(self._text(middle, y + 44 + 17 * number, line, faint=True) for number, line in enumerate(lines)),
        ]

    def arrow(
        self, start: tuple[int, int], end: tuple[int, int], label: str, *, side: str = "above", colour: str = ""
    ) -> list[str]:
        """A straight line with a head, and its label above it or on one side."""
        (x1, y1), (x2, y2) = start, end
        colour = colour or self._palette.line
        across, down = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        # The head is 9 long, and the line ends inside of it.
        left = f"{x2 - 9 * across - 5 * down},{y2 - 9 * down - 5 * across}"
        right = f"{x2 - 9 * across + 5 * down},{y2 - 9 * down + 5 * across}"
        parts = [
            f'<line x1="{x1}" y1="{y1}" x2="{x2 - 8 * across}" y2="{y2 - 8 * down}" stroke="{colour}" '
            'stroke-width="1.6"/>',
            f'<polygon points="{x2},{y2} {left} {right}" fill="{colour}"/>',
        ]
        x, y = (x1 + x2) // 2, (y1 + y2) // 2
        if not label:
            return parts
        if side == "above":
            return [*parts, self._text(x - 3, y - 8, label, faint=True)]
        anchor, x = ("end", x - 9) if side == "left" else ("start", x + 9)
        return [*parts, self._text(x, y + 4, label, faint=True, anchor=anchor)]

    def interface(self, x: int, y: int, name: str, network: str, colour: str) -> list[str]:
        """An interface of the pod, in the colour of its network."""
        return [
            f'<rect x="{x}" y="{y}" width="108" height="36" rx="4" fill="{self._palette.page}" stroke="{colour}"/>',
            self._text(x + 54, y + 15, name, bold=True, colour=colour),
            self._text(x + 54, y + 30, network, faint=True, size=11),
        ]

    def _text(
        self,
        x: int,
        y: int,
        text: str,
        *,
        bold: bool = False,
        faint: bool = False,
        anchor: str = "middle",
        colour: str = "",
        size: int = 0,
    ) -> str:
        fill = colour or (self._palette.faint if faint else self._palette.text)
        style = (' font-weight="bold"' if bold else "") + (f' font-size="{size}"' if size else "")
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}"{style}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
