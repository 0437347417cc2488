"""Tests of `MemberTable`: answers of a store add workers at once and drop them slowly."""

from __future__ import annotations

from itertools import cycle, islice
from random import Random

import pytest

from server.membership.member_table import PARTIAL_ROUNDS, MemberTable
from triolet.config.members import MAX_MEMBERS, Member, Members
from triolet.ids import Role

ROLES = (Role.PREFILL, Role.DECODE)
ABSENT = 3


def member(name: str, role: Role = Role.DECODE, model: str = "") -> Member:
    return Member(role, f"tcp://{name}:1", model)


A, B, C, D = (member(name) for name in "abcd")


class Told:
    """A table, and the changes that it reported.

    Attributes:
      alive: names of live workers.
      changes: the members after each change.
    """

    def __init__(
        self, *first: Member, absent_answers: int | None = ABSENT, alive: str = ""
    ) -> None:
        self.alive = alive
        self.changes: list[set[Member]] = []
        self._table = MemberTable(
            first, lambda: {f"tcp://{name}:1" for name in self.alive}, absent_answers
        )

    def answer(self, *found: Member, roles: tuple[Role, ...] = (Role.DECODE,)) -> str:
        return self._table.take(found, roles, self._use)

    def _use(self, members: Members) -> None:
        assert members.models is None
        self.changes.append({*members.members})


def test_a_named_worker_is_a_member_at_once_and_an_equal_answer_changes_nothing() -> None:
    told = Told()
    assert [told.answer(A), told.answer(A), told.answer(B, A)] == [""] * 3
    assert told.changes == [{A}, {A, B}]


def test_a_living_worker_leaves_after_several_answers_without_it() -> None:
    told = Told(alive="ab")
    told.answer(A, B)
    for _ in range(ABSENT - 1):
        told.answer(A)
    assert told.changes == [{A, B}]
    told.answer(A)
    assert told.changes == [{A, B}, {A}]


def test_an_empty_answer_changes_nothing_and_says_so() -> None:
    told = Told(alive="a")
    told.answer(A, B)
    assert [bool(told.answer()) for _ in range(9)] == [True] * 9
    assert told.changes == [{A, B}]


def test_an_answer_of_strangers_only_removes_nobody() -> None:
    told = Told(alive="ab")
    told.answer(A, B)
    for _ in range(9):
        told.answer(C, D)
    assert told.changes == [{A, B}, {A, B, C, D}]
    for _ in range(ABSENT):
        told.answer(A, B)
    assert told.changes[2:] == [{A, B}]


def test_if_all_workers_are_replaced_the_old_ones_stay_until_a_new_one_lives() -> None:
    told = Told(alive="ab")
    told.answer(A, B)
    for _ in range(9):
        told.answer(C)
    told.alive = "abc"
    for _ in range(ABSENT):
        told.answer(C)
    assert told.changes == [{A, B}, {A, B, C}, {C}]


def test_round_robin_answers_do_not_flap() -> None:
    told = Told(alive="abcd")
    for one in islice(cycle((A, B, C, D)), 400):
        told.answer(one)
    assert told.changes == [{A}, {A, B}, {A, B, C}, {A, B, C, D}]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_random_parts_soon_stop_to_flap(size: int) -> None:
    told, draw = Told(alive="abcd"), Random(7)
    for _ in range(200):
        told.answer(*draw.sample((A, B, C, D), size))
    flaps = len(told.changes)
    for _ in range(5_000):
        told.answer(*draw.sample((A, B, C, D), size))
    assert len(told.changes) <= flaps + 1
    # A worker that has really left is still dropped.
    for _ in range(4 * PARTIAL_ROUNDS + 1):
        told.answer(*draw.sample((A, B, C), size))
    assert D not in told.changes[-1]


def test_a_dead_worker_leaves_soon_even_if_answers_were_partial_before() -> None:
    told = Told(alive="abcd")
    for one in islice(cycle((A, B, C, D)), 40):
        told.answer(one)
    told.alive = "abc"
    for _ in range(ABSENT + 1):
        told.answer(A, B, C)
    assert told.changes[-1] == {A, B, C}


def test_a_worker_that_registered_itself_stays_until_heartbeats_miss_it_too() -> None:
    told = Told(absent_answers=None, alive="ab")
    told.answer(A, B)
    for _ in range(99):
        told.answer(A)
    assert told.changes == [{A, B}]
    told.alive = "a"
    told.answer(A)
    assert told.changes == [{A, B}, {A}]


def test_a_role_that_an_answer_is_not_about_stays() -> None:
    prefill = member("p", Role.PREFILL)
    told = Told(prefill, B, alive="ab")
    for _ in range(ABSENT):
        told.answer(A)
    assert told.changes == [{prefill, A, B}, {prefill, A}]


def test_another_role_or_model_at_an_address_replaces_the_worker_there() -> None:
    told = Told(absent_answers=None, alive="a")
    told.answer(A, roles=ROLES)
    told.answer(other := member("a", Role.PREFILL, "chat"), roles=ROLES)
    assert told.changes == [{A}, {other}]


def test_the_number_of_members_is_bounded() -> None:
    told = Told(A, alive="a")
    many = [member(f"s{number}") for number in range(MAX_MEMBERS)]
    assert "1025 members; allowed: 1024" in told.answer(*many)
    assert told.changes == []
    assert told.answer(*many[1:]) == ""
    # Different strangers in each answer do not accumulate, and the real workers come back.
    assert told.answer(*(member(f"t{number}") for number in range(9)))
    for _ in range(ABSENT):
        assert told.answer(A) == ""
    assert told.changes[-1] == {A}
