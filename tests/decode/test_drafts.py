"""Tests of speculative decoding with a draft model: it follows the accepted tokens, keeps its KV in
a pool of its own, and never changes the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from decode.drafts import Drafts
from tests.decode.test_scheduler import attempt
from tests.worker.pair import Pair
from tests.worker.phases import PROMPT
from tests.worker.scripts import VOCAB_SIZE, completion, hashes, scripted_engine
from triolet.config import SpeculationConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decode.attempt import DecodeAttempt
    from engine.batch import StepRow
    from simulation.engine import ScriptedEngine

NUM_TOKENS = 40


def config(**bounds: int) -> SpeculationConfig:
    return SpeculationConfig(
        **{"max_step_tokens": 64, "pause_rows": 1, "max_pause_rows": 1, **bounds}  # type: ignore[arg-type]
    )


def drafts(engine: ScriptedEngine, **bounds: int) -> Drafts:
    return Drafts(engine, config(**bounds), VOCAB_SIZE)


def sizes_of_steps(engine: ScriptedEngine) -> list[int]:
    """Return a list that collects the token count of each step."""
    sizes: list[int] = []

    def note(rows: Sequence[StepRow]) -> None:
        sizes.append(sum(len(row.token_ids) for row in rows))

    engine.before_step = note
    return sizes


def sequence(order: int, length: int = 9, num_outputs: int = 1) -> DecodeAttempt:
    """Return an attempt with prompt and completion of the scripted engine."""
    made = attempt(order)
    made.prompt_ids = tuple(range(order, order + length))
    made.sampling = SamplingParams(max_tokens=500, seed=order)
    made.output_ids[:] = completion(made.prompt_ids, order, num_outputs)
    return made


def run_round(subject: Drafts, wanted: Sequence[tuple[DecodeAttempt, int]]) -> int:
    """Plan, compute and complete a round; return how many sequences had a row."""
    rows = subject.plan(wanted)
    if rows:
        subject.complete(subject.compute(rows))
    return len(rows)


@pytest.mark.parametrize("wrong_every", [0, 2, 3, 7])
@pytest.mark.parametrize("chunk", [3, 64])
def test_answers_are_the_model_s_and_the_draft_s_kv_is_always_right(
    wrong_every: int, chunk: int
) -> None:
    engine = scripted_engine(200, hashes(wrong_every=wrong_every))
    source = drafts(engine, draft_chunk_tokens=chunk)
    pair = Pair(200, source=source, speculation=config())
    keys = [pair.ask(PROMPT[:n], max_tokens=NUM_TOKENS, seed=n) for n in (5, 9, 12)]
    pair.run()
    for key, n in zip(keys, (5, 9, 12), strict=True):
        assert pair.heard[key].tokens == dict(enumerate(completion(PROMPT[:n], n, NUM_TOKENS)))
    counters = pair.decode.counters
    if not wrong_every:
        assert counters.speculative_accepted == counters.speculative_proposed > NUM_TOKENS
    else:
        # Right up to the next position that is a multiple: with KV that is wrong nothing would be.
        assert counters.speculative_accepted > NUM_TOKENS / 4
        assert counters.speculative_accepted < counters.speculative_proposed
    pair.check_empty()
    assert engine.ledger.leased_blocks == 0
    assert engine.ledger.num_spoiled == 0


def test_a_long_prompt_is_caught_up_with_in_chunks() -> None:
    engine = scripted_engine(100)
    sizes = sizes_of_steps(engine)
    subject = drafts(engine, draft_chunk_tokens=16)
    row = sequence(1, length=40)
    for _ in range(2):
        assert run_round(subject, [(row, 4)]) == 1
        assert subject.guess(row, 4) == ()
    run_round(subject, [(row, 4)])
    assert list(subject.guess(row, 4)) == completion(row.prompt_ids, 1, 5)[1:]
    assert sizes == [16, 16, 9, 1, 1, 1]


def test_nothing_is_computed_twice() -> None:
    engine = scripted_engine(100)
    sizes = sizes_of_steps(engine)
    subject, row = drafts(engine), sequence(1)
    run_round(subject, [(row, 3)])
    assert run_round(subject, [(row, 3)]) == 0, "these guesses have not been used yet"
    tokens = completion(row.prompt_ids, 1, 20)
    row.output_ids += tokens[1:5]  # all three held, and one more was decided
    del sizes[:]
    run_round(subject, [(row, 2)])
    # The last guess and what followed it; then one more.
    assert sizes == [2, 1]
    assert list(subject.guess(row, 2)) == tokens[5:7]
    assert list(subject.guess(row, 1)) == tokens[5:6]
    row.output_ids += [tokens[5], 3]  # the second was wrong
    del sizes[:]
    run_round(subject, [(row, 1)])
    assert sizes == [1]


@pytest.mark.parametrize("num_decided", range(1, 8))
def test_fewer_may_be_decided_than_were_guessed_also_if_all_were_right(num_decided: int) -> None:
    engine = scripted_engine(100)
    subject, row = drafts(engine), sequence(1)
    tokens = completion(row.prompt_ids, 1, 40)
    run_round(subject, [(row, 4)])
    for _ in range(4):
        position = len(row.output_ids)
        row.output_ids += tokens[position : position + num_decided]
        assert run_round(subject, [(row, 4)]) == 1
        position += num_decided
        assert list(subject.guess(row, 4)) == tokens[position : position + 4]
    subject.forget(row.key)
    assert engine.ledger.leased_blocks == 0


def test_who_ends_while_drafts_are_computed_gives_its_blocks_back_afterwards() -> None:
    engine = scripted_engine(100)
    subject, row = drafts(engine), sequence(1)
    rows = subject.plan([(row, 3)])
    held = engine.ledger.leased_blocks
    assert held > 0
    subject.forget(row.key)
    assert engine.ledger.leased_blocks == held
    subject.complete(subject.compute(rows))
    assert engine.ledger.leased_blocks == 0
    assert engine.ledger.num_spoiled == 0
    assert subject.guess(row, 3) == ()
    subject.forget(row.key)


def test_after_a_step_that_raised_there_are_no_drafts_any_more() -> None:
    engine = scripted_engine(100)
    subject, row = drafts(engine), sequence(1)
    subject.plan([(row, 3)])
    subject.fail()
    assert run_round(subject, [(row, 3)]) == 0
    assert subject.guess(row, 3) == ()
    subject.forget(row.key)
    assert engine.ledger.leased_blocks == 0


def test_who_does_not_fit_goes_without() -> None:
    engine = scripted_engine(5)
    subject = drafts(engine)
    first, second = sequence(1), sequence(2)
    assert run_round(subject, [(first, 3), (second, 3)]) == 1
    assert len(subject.guess(first, 3)) == 3
    assert subject.guess(second, 3) == ()
    subject.forget(first.key)
    assert run_round(subject, [(second, 3)]) == 1
    subject.forget(second.key)
    assert engine.ledger.leased_blocks == 0


def test_beyond_the_draft_s_context_nothing_is_guessed() -> None:
    engine = scripted_engine(100, max_model_len=12)
    subject, row = drafts(engine), sequence(1)
    assert run_round(subject, [(row, 3)]) == 1
    row.output_ids += [1, 2]
    assert run_round(subject, [(row, 3)]) == 0
    subject.forget(row.key)
    assert engine.ledger.leased_blocks == 0


def test_ids_that_only_one_of_the_models_has_are_no_guesses() -> None:
    row = sequence(1)
    tokens = completion(row.prompt_ids, 1, 9)[1:]
    small = max(tokens[:3]) + 1
    count = next(i for i, token_id in enumerate([*tokens, small]) if token_id >= small)
    subject = Drafts(scripted_engine(100), config(), vocab_size=small)
    run_round(subject, [(row, 8)])
    assert list(subject.guess(row, 8)) == tokens[:count]
    engine = scripted_engine(100)
    engine.vocab_size = max(row.prompt_ids)
    assert run_round(drafts(engine), [(row, 3)]) == 0


def test_an_audit_shows_the_draft_s_pool() -> None:
    engine = scripted_engine(50)
    pair = Pair(source=drafts(engine), speculation=config())
    key = pair.ask(PROMPT, max_tokens=NUM_TOKENS, allowed=5)
    pair.run()
    audit = pair.decode.account(pair.now)
    assert audit.draft_pool is not None
    assert audit.draft_pool.total_blocks == 50
    assert audit.draft_pool.leased_blocks == engine.ledger.leased_blocks > 0
    pair.check()
    pair.end(key)
    pair.check_empty()
    assert Pair().decode.account(0.0).draft_pool is None
    assert pair.heard[key].ended[Role.DECODE]
