"""Tests of which tenants get their own counters."""

from __future__ import annotations

from random import Random

from server.slo.meter import OTHERS, TopTenants


def test_while_there_are_few_each_has_its_name() -> None:
    top = TopTenants(shown=2, tracked=8)
    assert [top.name_of(one) for one in ("a", "b", "c", "a")] == ["a", "b", OTHERS, "a"]


def test_the_tenants_with_the_most_tokens_come_to_have_names() -> None:
    top = TopTenants(shown=2, tracked=8)
    assert {top.name_of("small"), top.name_of("tiny")} == {"small", "tiny"}
    ranked = [top.add(one, tokens) for one, tokens in 2 * [("large", 90), ("mid", 50)]]
    ranked += [top.add("small", 10), top.add("tiny", 1), top.add("tiny", 1), top.add("tiny", 1)]
    assert ranked == 7 * [False] + [True]
    assert top.names == {"large", "mid"}
    assert top.name_of("small") == OTHERS


def test_a_tenant_that_was_large_once_makes_room() -> None:
    top = TopTenants(shown=1, tracked=4)
    top.name_of("once")
    top.add("once", 1000)
    for _ in range(60):
        top.add("now", 40)
    assert top.names == {"now"}


def test_any_number_of_tenants_takes_bounded_memory() -> None:
    top, rng = TopTenants(shown=3, tracked=16), Random(1)
    for number in range(5000):
        top.name_of(f"t{number}")
        top.add(f"t{number}", rng.randrange(100))
        assert len(top.names) <= 3
        assert len(top._tokens) <= 8 + 16
