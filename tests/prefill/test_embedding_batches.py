"""Tests of choosing the next batch of embedding inputs: how long inputs wait for others, batch
size, age, and priority of chats."""

from __future__ import annotations

import pytest

from engine.pooling import Pool
from prefill.embedding import Embedding, StepRoom, StepTokens, due_at, part_tokens, plan_inputs
from triolet.config import EmbeddingConfig
from triolet.ids import AttemptKey, PeerId, Role
from triolet.pooling import VectorForm

CONFIG = EmbeddingConfig(max_batch_tokens=64, max_wait_s=0.01)
ROOM = StepRoom(max_tokens=64, free_blocks=100, total_blocks=100, is_beside_chat=False)
SERVER = PeerId(Role.SERVER, "server-0", 1)


def of_length(number: int, num_tokens: int, *, priority: int = 0, at: float = 5.0) -> Embedding:
    """Return an input with a length and an order of arrival."""
    return Embedding(
        AttemptKey(number.to_bytes(16, "big"), 0),
        SERVER,
        tuple(range(num_tokens)),
        Pool(VectorForm(), num_tokens),
        priority,
        order=number,
        arrived_at=at,
        num_blocks=-(-num_tokens // 4),
    )


def planned(
    *waiting: Embedding, room: StepRoom = ROOM, config: EmbeddingConfig = CONFIG
) -> dict[int, int]:
    """Return how many tokens each input gets, by its number."""
    return {chunk.embedding.order: chunk.num_tokens for chunk in plan_inputs(waiting, room, config)}


def test_an_input_waits_a_moment_for_company_and_a_full_batch_for_nobody() -> None:
    assert due_at([], CONFIG) is None
    assert due_at([of_length(1, 5), of_length(2, 5, at=6.0)], CONFIG) == 5.01
    assert due_at([of_length(1, 60), of_length(2, 4)], CONFIG) == 5.0


def test_what_has_begun_goes_on_at_once() -> None:
    begun = of_length(1, 100)
    begun.started_at, begun.num_computed_tokens = 5.0, 64
    assert due_at([begun, of_length(2, 4, at=9.0)], CONFIG) == 5.0


@pytest.mark.parametrize(
    ("waiting", "room", "expected"),
    [
        pytest.param(
            [of_length(n, 8) for n in range(8)],
            ROOM,
            dict.fromkeys(range(8), 8),
            id="short inputs go together",
        ),
        pytest.param(
            [of_length(0, 400), of_length(1, 20), of_length(2, 10)],
            ROOM._replace(total_blocks=1000, free_blocks=1000),
            {0: 16, 2: 10, 1: 20},
            id="the shortest go first, and the oldest has its part",
        ),
        pytest.param(
            [of_length(0, 5), of_length(1, 400), of_length(2, 6)],
            ROOM,
            {0: 5, 2: 6},
            id="no younger long one is in a batch of short ones",
        ),
        pytest.param(
            [of_length(0, 400), of_length(1, 300)],
            ROOM,
            {0: 64},
            id="long ones among themselves are chunked",
        ),
        pytest.param(
            [of_length(0, 6), of_length(1, 6)],
            ROOM._replace(is_beside_chat=True),
            {0: 6, 1: 2},
            id="beside chats inputs get a small share",
        ),
        pytest.param(
            [of_length(0, 20), of_length(1, 30, priority=9), of_length(2, 40, priority=-1)],
            ROOM,
            {0: 20, 2: 40, 1: 4},
            id="the important go first",
        ),
        pytest.param(
            [of_length(n, 8) for n in range(4)],
            ROOM._replace(total_blocks=16, free_blocks=16),
            {0: 8, 1: 8},
            id="inputs take no more than their part of the pool",
        ),
        pytest.param(
            [of_length(0, 8)],
            ROOM._replace(free_blocks=1),
            {},
            id="without free blocks nobody begins",
        ),
    ],
)
def test_a_step_takes_the_inputs_that_are_due(
    waiting: list[Embedding], room: StepRoom, expected: dict[int, int]
) -> None:
    assert planned(*waiting, room=room) == expected


def test_one_that_is_larger_than_that_part_goes_alone() -> None:
    room = ROOM._replace(total_blocks=16, free_blocks=16)
    large, begun = of_length(0, 40), of_length(1, 8)
    assert planned(large, of_length(2, 8), room=room) == {0: 40}
    begun.started_at = 5.0
    assert planned(large, begun, room=room) == {1: 8}


def test_one_by_one_means_one_whole_input_a_step() -> None:
    config = EmbeddingConfig(max_batch_tokens=1, max_wait_s=0.0)
    assert planned(of_length(0, 20), of_length(1, 5), config=config) == {0: 20}


@pytest.mark.parametrize(
    ("narrow", "wide", "chats_wait", "inputs_are_due", "expected"),
    [
        (80, 320, False, True, StepTokens(80, 320)),
        (80, 320, False, False, StepTokens(80, 320)),
        (80, 320, True, True, StepTokens(70, 80)),
        (80, 320, True, False, StepTokens(80, 80)),
        (16, 64, True, True, StepTokens(14, 16)),
        (4, 64, True, True, StepTokens(4, 4)),
        (80, 64, False, True, StepTokens(80, 80)),
    ],
)
def test_a_step_is_wide_only_while_no_chat_waits(
    narrow: int, wide: int, chats_wait: bool, inputs_are_due: bool, expected: StepTokens
) -> None:
    found = part_tokens(narrow, wide, chats_wait=chats_wait, inputs_are_due=inputs_are_due)
    assert found == expected
