"""Plots are SVG that a browser takes, and say what was measured."""

import xml.etree.ElementTree as ElementTree

from bench import plot
from bench.plot import Group
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


def test_the_same_figures_give_the_same_plot() -> None:
    group = [Group("g", [("ours", Figure.exact(5, "ms"))])]
    assert plot.dots("t", "a", group) == plot.dots("t", "a", group)
