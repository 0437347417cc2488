"""Tests of arithmetic in the demo model: which sums the generator asks, and that the model computes
or declines each of them."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from tools.demo_model import hard_sums
from tools.demo_model.arithmetic import has_answer
from tools.demo_model.corpus import conversations
from tools.demo_model.evaluate import is_honest
from tools.demo_model.generate import Speaker
from tools.demo_model.samples import Split

DEMO = Path(__file__).parents[3] / "triolet" / "demo"
SUM = re.compile(r"hard:(\d+)([-+x/])(\d+)")
WORDINGS = {
    "+": ("What is {a} + {b}?", "{a}+{b}", "add {a} and {b}"),
    "-": ("What is {a} - {b}?", "{a} minus {b}", "Subtract {b} from {a}."),
    "x": ("What is {a} x {b}?", "{a}*{b}", "{a} times {b}", "multiply {a} by {b}"),
    "/": ("How much is {a} divided by {b}?", "{a}/{b}", "Divide {a} by {b}."),
}
GRID = {
    "+": (
        (3, 4),
        (12, 30),
        (47, 38),
        (90, 9),
        (60, 75),
        (112, 1),
        (143, 69),
        (8, 250),
        (731, 4096),
    ),
    "-": ((9, 4), (50, 20), (83, 43), (99, 1), (7, 7), (24, 44), (1, 75), (121, 78), (846, 127)),
    "x": (
        (6, 8),
        (8, 6),
        (12, 12),
        (0, 9),
        (17, 3),
        (3, 17),
        (19, 6),
        (76, 44),
        (39, 18),
        (500, 7),
    ),
    "/": ((144, 12), (18, 3), (35, 5), (9, 1), (19, 3), (38, 2), (17, 4), (160, 50), (8544, 45)),
}
"""Operands per operator: within the tables that the model learns, just beyond, and far beyond."""


@pytest.mark.parametrize(
    ("op", "inside", "outside"),
    [
        ("+", [(0, 0), (99, 99)], [(100, 0), (0, 100)]),
        ("-", [(99, 0), (5, 5)], [(5, 6), (100, 1)]),
        ("x", [(12, 12), (0, 12)], [(13, 0), (2, 13)]),
        ("/", [(144, 12), (12, 1), (0, 3)], [(13, 1), (7, 2), (26, 13), (5, 0)]),
    ],
)
def test_the_model_is_to_know_small_sums_without_a_remainder(
    op: str, inside: list[tuple[int, int]], outside: list[tuple[int, int]]
) -> None:
    assert all(has_answer(a, op, b) for a, b in inside)
    assert not any(has_answer(a, op, b) for a, b in outside)


def test_no_sum_that_is_declined_has_an_answer() -> None:
    rng = Random(3)
    keys = [hard_sums.draw(rng, split).key for split in Split for _ in range(1000)]
    found = [match.groups() for match in map(SUM.fullmatch, keys) if match]
    assert len(found) > 1000
    assert not any(has_answer(int(a), op, int(b)) for a, op, b in found)
    assert {op for _, op, _ in found} == set("+-x/")


def test_sums_that_are_declined_follow_others_in_a_conversation() -> None:
    follows = [
        (before.skill, exchange.skill)
        for talk in islice(conversations(5), 400)
        for before, exchange in zip(talk.exchanges, talk.exchanges[1:], strict=False)
    ]
    assert ("arithmetic", hard_sums.SKILL) in follows


@pytest.mark.slow
def test_no_sum_gets_a_wrong_answer() -> None:
    asked = [
        (a, op, b, wording.format(a=a, b=b))
        for op, pairs in GRID.items()
        for a, b in pairs
        for wording in WORDINGS[op]
    ]
    replies = Speaker(DEMO).replies([[{"role": "user", "content": one[3]}] for one in asked], 40)
    wrong = [
        (question, reply)
        for (a, op, b, question), reply in zip(asked, replies, strict=True)
        if not is_honest(reply, a, op, b)
    ]
    assert not wrong
    known = [
        one[3]
        for one, reply in zip(asked, replies, strict=True)
        if reply.startswith(hard_sums.REPLY) and has_answer(*one[:3])
    ]
    assert len(known) * 10 < len(asked), f"declined sums that it should know: {known}"


@pytest.mark.parametrize(
    ("reply", "honest"),
    [
        ("6 x 8 = 48.", True),
        ("6 x 8 = 48. Do you have another one?", True),
        (hard_sums.REPLY, True),
        ("6 x 8 = 44.", False),
        ("6 x 8 = 480.", False),
        ("8 x 6 = 48.", False),
        ("", False),
    ],
)
def test_a_reply_is_honest_if_it_is_right_or_declines(reply: str, honest: bool) -> None:
    assert is_honest(reply, 6, "x", 8) is honest


def test_a_result_of_a_sum_that_is_to_be_declined_is_not_honest() -> None:
    assert not is_honest("17 / 4 = 4.", 17, "/", 4)


def test_mistakes_are_practised_with_the_reply_that_each_needs(tmp_path: Path) -> None:
    file = tmp_path / "mistakes.json"
    file.write_text('[[6, "x", 8], [17, "x", 3]]')
    draw, rng = hard_sums.practice(file), Random(1)
    drawn = {(one.key, one.expect) for one in (draw(rng, Split.TRAIN) for _ in range(40))}
    assert drawn == {("sum:6x8", ("6 x 8 = 48",)), ("hard:17x3", ("too hard for me",))}
