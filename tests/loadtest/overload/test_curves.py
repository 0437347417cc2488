"""Tests of the SVG curves of overload reports."""

from __future__ import annotations

from xml.etree import ElementTree

from loadtest.overload.goals import Line, Panel, draw


def test_a_picture_has_every_line_of_every_panel_and_one_legend() -> None:
    lines = [
        Line("with <all>", [(0.5, 1.0), (1.0, None), (10.0, 3.0)]),
        Line("without", [(0.5, 1.0), (10.0, 300.0)]),
    ]
    picture = draw([Panel("one", lines, top=8.0, mark=2.0), Panel("two", lines)], columns=2)
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    drawn = [path for path in root.iter(f"{space}path") if path.get("fill") == "none"]
    assert len(drawn) == 4
    words = ["".join(text.itertext()) for text in root.iter(f"{space}text")]
    assert words.count("with <all>") == words.count("without") == 1
    assert {"one", "two", "0.5", "10"} <= set(words)


def test_a_line_without_a_value_is_not_drawn() -> None:
    picture = draw([Panel("none", [Line("empty", [(1.0, None)])])])
    assert 'fill="none"' not in picture
