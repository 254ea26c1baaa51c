"""Plots are SVG that a browser takes, and say what was measured."""

import xml.etree.ElementTree as ElementTree

from bench import plot
from bench.plot import Group, Line
from bench.stats import Figure

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def circles(svg: str, place: str) -> list[float]:
    return [float(element.attrib[place]) for element in ElementTree.fromstring(svg).iter(f"{SVG}circle")]


def test_dots_lie_by_their_value_and_are_named() -> None:
    rows = [("ours", Figure(2.0, "ms", 1.5, 3.0, 9)), ("peer", Figure(20.0, "ms", 10.0, 40.0, 9))]
    svg = plot.dots("A < B", "milliseconds", [Group("ADD", rows)])
    assert {"A < B", "milliseconds", "ADD", "ours", "peer", "2", "20"} <= set(texts(svg))
    first, second = circles(svg, "cx")
    assert first < second


def test_dots_stay_inside_with_one_value_for_all() -> None:
    (place,) = circles(plot.dots("t", "a", [Group("g", [("ours", Figure.exact(5, "ms"))])]), "cx")
    assert 0 < place < 760


def test_lines_rise_upwards_and_names_do_not_cover_each_other() -> None:
    ours = Line("ours", [(1, Figure.exact(10, "ms")), (64, Figure.exact(100, "ms"))])
    bare = Line("bare", [(1, Figure.exact(10, "ms")), (64, Figure.exact(101, "ms"))])
    svg = plot.lines("t", "ms", "pods", [ours, bare])
    heights = circles(svg, "cy")
    assert heights[1] < heights[0], "y grows downwards in SVG"
    labels = [
        float(element.attrib["y"])
        for element in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if (element.text or "").startswith(("ours", "bare"))
    ]
    assert abs(labels[0] - labels[1]) >= 12


def test_the_same_figures_give_the_same_plot() -> None:
    group = [Group("g", [("ours", Figure.exact(5, "ms"))])]
    assert plot.dots("t", "a", group) == plot.dots("t", "a", group)
