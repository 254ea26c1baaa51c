"""The README's picture is what its script draws, and nothing in it is cut off."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from docs import diagram

SVG = "{http://www.w3.org/2000/svg}"
# A wide font, such as DejaVu Sans: its letters are less than 0.58 of its size on average.
WIDTH_OF_A_LETTER = 0.58


def test_each_file_is_what_the_script_draws() -> None:
    drawn = {f"{name}.svg": diagram.drawn(palette) for name, palette in diagram.PALETTES.items()}
    found = {path.name: path.read_text() for path in diagram.FOLDER.iterdir()}
    assert found == drawn, "run `python docs/diagram.py`"


def test_they_differ_in_their_colours_only() -> None:
    light, dark = (diagram.drawn(palette) for palette in diagram.PALETTES.values())
    colours = {"light": diagram.PALETTES["light"], "dark": diagram.PALETTES["dark"]}
    assert light != dark
    assert texts(light) == texts(dark)
    assert colours["dark"].page in dark
    assert colours["light"].page not in dark


def texts(svg: str) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", diagram.PALETTES)
def test_every_text_fits_into_the_box_around_it(name: str) -> None:
    root = ElementTree.fromstring(diagram.drawn(diagram.PALETTES[name]))
    boxes = [
        {key: float(item.attrib[key]) for key in ("x", "y", "width", "height")}
        for item in root.iter(f"{SVG}rect")
        if "x" in item.attrib
    ]
    size = float(root.attrib["font-size"])
    checked = 0
    for item in root.iter(f"{SVG}text"):
        x, y, own = float(item.attrib["x"]), float(item.attrib["y"]), float(item.attrib.get("font-size", size))
        around = [
            box for box in boxes if box["x"] < x < box["x"] + box["width"] and box["y"] < y < box["y"] + box["height"]
        ]
        if around:
            checked += 1
            assert len(item.text or "") * own * WIDTH_OF_A_LETTER < min(box["width"] for box in around), item.text
    assert checked > 12
