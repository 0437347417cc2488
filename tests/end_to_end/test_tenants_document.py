"""Tests that the tenants file in docs/TENANTS.md is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from triolet.tenants.form import read_tenants
from triolet.tenants.plans import Plan

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "docs" / "TENANTS.md").read_text(encoding="utf-8")
FILES: Final = re.findall(r"^```toml\n(.*?)^```", TEXT, re.M | re.S)


def test_the_file_that_is_shown_is_right_and_shows_every_field_of_a_plan() -> None:
    (text,) = FILES
    tenants = read_tenants(text.encode(), "docs/TENANTS.md")
    assert set(tenants.by_name) == {"alice", "root"}
    gold = tenants.by_name["alice"].plan
    assert gold is tenants.plans["gold"]
    shown = re.findall(r"^(\w+) =", text.partition("[plans.gold]")[2].partition("[ten")[0], re.M)
    assert {"name", *shown} == set(Plan.__slots__)
