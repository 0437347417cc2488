"""Tests of grammar-constrained completions on real workers: tokens are the same in any batch, with
guesses, and after a new attempt."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from loadtest.schemas import AMBIGUOUS
from transport.frames import EndReason
from triolet.config import (
    LOOKUP,
    OFF,
    EngineConfig,
    LinkConfig,
    MaskConfig,
    SpeculationConfig,
)
from triolet.ids import Role
from triolet.sampling import Grammar, GrammarKind, ReasoningTokens, SamplingParams
from triolet.units import MIB

from .real import Engines, open_engines, open_workers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from .client import Answer, Client

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "triolet" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
EOS = (1,)
PROMPT: list[int] = TOKENIZER.encode("<|user|>Tell me a story<|end|><|assistant|>").ids
WORDS = ["fox", "moon"]
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "words": {
            "type": "array",
            "items": {"enum": WORDS},
            "minItems": 6,
            "maxItems": 8,
        },
    },
    "required": ["title", "words"],
    "additionalProperties": False,
}
JSON = SamplingParams(
    max_tokens=200, seed=3, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
)
WORD = SamplingParams(max_tokens=60, seed=4, grammar=Grammar(GrammarKind.REGEX, "[a-z]{8,9}!"))
FREE = SamplingParams(max_tokens=40, seed=5)
PERIOD, PAD = TOKENIZER.token_to_id("."), TOKENIZER.token_to_id("<|pad|>")
BUDGET = 12
REASONED = replace(JSON, reasoning=ReasoningTokens(closings=((PERIOD,),), forced=(PERIOD,)))
"""The model ends its first sentence by itself."""
BOUNDED = replace(
    JSON,
    reasoning=ReasoningTokens(closings=((PAD, PERIOD),), forced=(PAD, PERIOD), budget=BUDGET),
)
"""The model never writes this closing by itself."""


SETTINGS = EngineConfig(kv_pool_bytes=8 * MIB, prefix_cache=False)


@pytest.fixture(scope="module")
def engines() -> Engines:
    return open_engines(DEMO, SETTINGS)


def workers(
    engines: Engines, directory: Path, speculation: SpeculationConfig = OFF
) -> AbstractAsyncContextManager[Client]:
    return open_workers(engines, DEMO, SETTINGS, directory, LinkConfig(), speculation)


async def completions(client: Client, *sampling: SamplingParams) -> list[list[int]]:
    """Return the results of requests that run together."""
    answers = [await client.start(PROMPT, one, eos_token_ids=EOS) for one in sampling]
    return [(await client.finish(answer)).token_ids for answer in answers]


async def rests(
    client: Client, sampling: SamplingParams, whole: list[int], replayed: Sequence[int]
) -> list[Answer]:
    """Continue an answer from several places, all in the same steps."""
    answers = [
        await client.start(PROMPT, sampling, replay=whole[:count], eos_token_ids=EOS)
        for count in replayed
    ]
    for answer, count in zip(answers, replayed, strict=True):
        await client.finish(answer)
        assert answer.token_ids == whole[count:], count
    return answers


async def test_together_or_alone_the_tokens_are_the_same_and_within_the_grammar(
    engines: Engines, tmp_path: Path
) -> None:
    async with workers(engines, tmp_path) as client:
        together = await completions(client, JSON, FREE, WORD)
        alone = [(await completions(client, one))[0] for one in (JSON, FREE, WORD)]
    assert together == alone
    document = json.loads(TOKENIZER.decode(alone[0]))
    assert len(document["title"]) <= 20
    assert set(document["words"]) <= {"fox", "moon"}
    assert re.fullmatch("[a-z]{8,9}!", TOKENIZER.decode(alone[2]))
    assert alone[0][-1] == alone[2][-1] == EOS[0]


async def test_a_new_attempt_goes_on_with_the_same_tokens(engines: Engines, tmp_path: Path) -> None:
    async with workers(engines, tmp_path) as client:
        [whole] = await completions(client, JSON)
        for rest in await rests(client, JSON, whole, (1, len(whole) // 2, len(whole) - 1)):
            assert rest.ended[Role.DECODE][0].reason is EndReason.STOP


async def test_guesses_change_no_token_of_it(engines: Engines, tmp_path: Path) -> None:
    async with workers(engines, tmp_path) as client:
        expected = await completions(client, JSON, WORD)
    other = tmp_path / "guessing"
    other.mkdir()
    async with workers(engines, other, SpeculationConfig(source=LOOKUP)) as client:
        assert await completions(client, JSON, WORD) == expected
        beat = client.links[Role.DECODE].beats[-1]
        await client.wait_until(lambda: client.links[Role.DECODE].beats[-1] is not beat)
        # The words of the list repeat themselves.
        assert client.links[Role.DECODE].beats[-1].load.speculative_accepted > 0


def document_of(answer: list[int]) -> dict[str, list[str]]:
    document: dict[str, list[str]] = json.loads(TOKENIZER.decode(answer))
    return document


async def test_an_answer_keeps_to_its_grammar_behind_its_reasoning(
    engines: Engines, tmp_path: Path
) -> None:
    async with workers(engines, tmp_path) as client:
        together = await completions(client, REASONED, FREE, BOUNDED)
        alone = [(await completions(client, one))[0] for one in (REASONED, FREE, BOUNDED)]
    assert together == alone
    reasoned, _, bounded = alone
    end = reasoned.index(PERIOD)
    assert end > 1
    assert set(document_of(reasoned[end + 1 :])["words"]) <= set(WORDS)
    assert bounded[BUDGET : BUDGET + 2] == [PAD, PERIOD]
    assert set(document_of(bounded[BUDGET + 2 :])["words"]) <= set(WORDS)
    assert reasoned[-1] == bounded[-1] == EOS[0]


@pytest.mark.parametrize("sampling", [REASONED, BOUNDED])
async def test_a_new_attempt_goes_on_within_reasoning_or_behind_it(
    engines: Engines, tmp_path: Path, sampling: SamplingParams
) -> None:
    async with workers(engines, tmp_path) as client:
        [whole] = await completions(client, sampling)
        assert sampling.reasoning is not None
        closing = sampling.reasoning.closing_behind(whole)
        assert closing is not None
        begin, end = closing
        await rests(client, sampling, whole, (1, begin - 1, begin, begin + 1, end, end + 3))


async def test_guesses_change_no_token_of_reasoning(engines: Engines, tmp_path: Path) -> None:
    async with workers(engines, tmp_path) as client:
        expected = await completions(client, REASONED, BOUNDED)
    other = tmp_path / "guessing"
    other.mkdir()
    async with workers(engines, other, SpeculationConfig(source=LOOKUP)) as client:
        assert await completions(client, REASONED, BOUNDED) == expected


async def test_what_no_token_may_follow_ends_alone(engines: Engines, tmp_path: Path) -> None:
    async with workers(engines, tmp_path) as client:
        # A completion that its grammar never allowed: as if a model's tokenizer could not say it.
        other = SamplingParams(seed=3, max_tokens=50, grammar=Grammar(GrammarKind.REGEX, "x"))
        [first] = await completions(client, other)
        stuck = await client.start(PROMPT, other, replay=[*first[:1], 99], eos_token_ids=EOS)
        free = await client.start(PROMPT, FREE, eos_token_ids=EOS)
        assert (await client.finish(stuck)).ended[Role.DECODE][0].reason is EndReason.STUCK
        ended = (await client.finish(free)).ended[Role.DECODE][0]
        assert ended.reason in (EndReason.STOP, EndReason.LENGTH)


async def test_rows_that_never_wait_for_their_masks_choose_the_same_tokens(
    engines: Engines, tmp_path: Path
) -> None:
    async with workers(engines, tmp_path) as client:
        expected = await completions(client, JSON, FREE, WORD)
    hurry = replace(
        SETTINGS,
        masks=MaskConfig(step_wait_share=0.0, least_wait_s=0.0, slow_mask_cpu_s=0.0),
    )
    hurried = open_engines(DEMO, hurry)
    for name, speculation in (("plain", OFF), ("guessing", SpeculationConfig(source=LOOKUP))):
        directory = tmp_path / name
        directory.mkdir()
        async with workers(hurried, directory, speculation) as client:
            assert await completions(client, JSON, FREE, WORD) == expected, name
            replay = expected[0][:30]
            answer = await client.start(PROMPT, JSON, replay=replay, eos_token_ids=EOS)
            await client.finish(answer)
            assert answer.token_ids == expected[0][30:], name


async def test_a_grammar_that_becomes_too_costly_ends_alone_and_says_so(
    engines: Engines, tmp_path: Path
) -> None:
    ambiguous = Grammar(GrammarKind.LARK, f"start: s\n{AMBIGUOUS}")
    costly = SamplingParams(seed=3, max_tokens=100, grammar=ambiguous)
    async with workers(engines, tmp_path) as client:
        [alone] = await completions(client, FREE)
        culprit = await client.start(PROMPT, costly, eos_token_ids=EOS)
        free = await client.start(PROMPT, FREE, eos_token_ids=EOS)
        ended = (await client.finish(culprit)).ended[Role.DECODE]
        assert [one.reason for one in ended] == [EndReason.TOO_COSTLY]
        assert (await client.finish(free)).token_ids == alone
        # Another attempt ends at the same token.
        replay = culprit.token_ids[:3]
        again = await client.start(PROMPT, costly, replay=replay, eos_token_ids=EOS)
        assert (await client.finish(again)).ended[Role.DECODE][0].reason is EndReason.TOO_COSTLY
        assert replay + again.token_ids == culprit.token_ids
