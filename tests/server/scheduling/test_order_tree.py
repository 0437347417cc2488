"""The tree of keys and sums, beside a sorted list."""

from __future__ import annotations

import random
from bisect import insort

import pytest

from server.scheduling.tenant_queue import OrderTree


@pytest.mark.parametrize("seed", range(4))
def test_it_is_a_sorted_list_with_sums(seed: int) -> None:
    rng = random.Random(seed)
    tree: OrderTree[tuple[int, float, int]] = OrderTree()
    slow: list[tuple[int, float, int]] = []
    amounts: dict[tuple[int, float, int], int] = {}
    for order in range(3000):
        # Grows in the first half, shrinks in the second, at the front more than elsewhere.
        if slow and rng.random() < (0.3 if order < 1500 else 0.7):
            key = slow.pop(0 if rng.random() < 0.6 else rng.randrange(len(slow)))
            tree.remove(key)
            del amounts[key]
        else:
            key = (rng.randrange(3), float(rng.randrange(40)), order)
            insort(slow, key)
            amounts[key] = rng.randrange(1, 9)
            tree.add(key, amounts[key])
        assert len(tree) == len(slow)
        assert tree.amount == sum(amounts.values())
        assert not slow or tree.first() == slow[0]
        if order % 50 == 0:
            assert list(tree) == slow
            asked = (rng.randrange(3), float(rng.randrange(40)), rng.randrange(3000))
            assert tree.amount_before(asked) == sum(amounts[key] for key in slow if key < asked)
    for key in list(tree):
        tree.remove(key)
    assert (len(tree), tree.amount, list(tree)) == (0, 0, [])
    tree.add((0, 0.0, 1), 5)
    assert tree.first() == (0, 0.0, 1)


def test_it_stays_shallow_where_keys_come_at_the_end_and_go_at_the_front() -> None:
    tree: OrderTree[tuple[int, float, int]] = OrderTree()
    for order in range(20_000):
        tree.add((0, 0.0, order), 1)
        if order >= 1000:
            tree.remove((0, 0.0, order - 1000))
    assert tree.depth <= 4
    assert tree.amount_before((0, 0.0, 19_500)) == 500


def test_what_is_not_there_cannot_be_taken_out() -> None:
    tree: OrderTree[tuple[int, float, int]] = OrderTree()
    tree.add((0, 0.0, 1), 1)
    with pytest.raises(AssertionError, match="only what is there"):
        tree.remove((0, 0.0, 0))
