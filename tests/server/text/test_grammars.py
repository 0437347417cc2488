"""Tests of checking grammars in a separate process: limits of time, memory and waiting, and fair
turns between clients."""

from __future__ import annotations

import json
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from loadtest.schemas import costly, random_schema
from server.text.grammar_check import GrammarAnswer, next_token
from server.text.grammars import Grammars
from server.text.processes import TextProcesses
from server.text.turns import enter_line
from tests.server.support.held_work import held_work
from triolet.config import GrammarConfig, ServerConfig, TurnsConfig
from triolet.errors import RequestError
from triolet.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

DEMO = Path(__file__).parents[3] / "triolet" / "demo"
GOOD = Grammar(GrammarKind.REGEX, "[a-z]+")
BAD = Grammar(GrammarKind.REGEX, "(a")
PATTERNS = {
    f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 9 + 1},40}}$"} for i in range(5000)
}
COSTLY = Grammar(
    GrammarKind.JSON_SCHEMA, json.dumps({"properties": PATTERNS, "required": list(PATTERNS)})
)
"""Usable, but takes seconds and many megabytes without reaching the compiler's own limits; far
larger than the API allows."""
PATIENT = GrammarConfig()
COUNTING = replace(PATIENT, cpu_s=50.0, walk_cpu_s=50.0, walk_mask_cpu_s=50.0)
"""Limits under which only the library's counts decide: the same on a slow processor."""


@asynccontextmanager
async def opened(
    config: GrammarConfig = PATIENT, tokenizer: Path = DEMO / "tokenizer.json"
) -> AsyncIterator[tuple[Grammars, list[str]]]:
    words: list[str] = []
    processes = TextProcesses(ServerConfig(text_processes=1, text_timeout_s=60.0))
    grammars = Grammars(tokenizer, (1,), config, processes.do, words.append)
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        yield grammars, words
        nursery.cancel_scope.cancel()


def idle(turns: TurnsConfig = TurnsConfig(), text_timeout_s: float = 60.0) -> TextProcesses:  # noqa: B008
    """Return text processes that are not running, so that all jobs wait."""
    return TextProcesses(ServerConfig(turns=turns, text_timeout_s=text_timeout_s))


def demo_grammars(
    processes: TextProcesses, count: Callable[[str], None] = lambda word: None
) -> Grammars:
    return Grammars(DEMO / "tokenizer.json", (1,), GrammarConfig(), processes.do, count)


@pytest.mark.slow
async def test_good_ones_pass_and_others_are_refused_by_name() -> None:
    async with opened() as (grammars, words):
        await grammars.check(GOOD, "guided_regex")
        for grammar, message in ((BAD, "unclosed group"), (COSTLY, "takes more than 50 ms")):
            with pytest.raises(RequestError, match=message) as caught:
                await grammars.check(grammar, "guided_regex")
            assert (caught.value.status, caught.value.param) == (400, "guided_regex")
        # The process outlives its children, and results are cached.
        await grammars.check(Grammar(GrammarKind.LARK, 'start: "yes" | "no"'), "guided_choice")
        await grammars.check(GOOD, "guided_regex")
    assert words == ["usable", "refused", "too_costly", "usable", "usable"]


@pytest.mark.slow
async def test_memory_is_bounded_too() -> None:
    config = GrammarConfig(cpu_s=50.0, memory_bytes=8 * 1024 * 1024)
    async with opened(config) as (grammars, _):
        with pytest.raises(RequestError) as caught:
            await grammars.check(COSTLY, "guided_json")
        assert caught.value.status == 400
        await grammars.check(GOOD, "guided_regex")


@pytest.mark.slow
async def test_a_tokenizer_that_cannot_be_used_refuses_every_grammar(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    async with opened(tokenizer=tokenizer) as (grammars, _):
        with pytest.raises(RequestError, match="tokenizer cannot be used"):
            await grammars.check(GOOD, "guided_regex")


async def test_another_tokenizer_at_the_same_path_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    asked = []
    for text in ((DEMO / "tokenizer.json").read_text(), "{}"):
        path.write_text(text)
        os.utime(path, ns=(0, len(text)))
        check, args = Grammars(path, (1,), COUNTING, idle().do).first_work
        asked.append(check(*args)[0])
    assert asked == [GrammarAnswer.USABLE, GrammarAnswer.REFUSED]


async def test_more_than_may_wait_are_refused_at_once() -> None:
    words: list[str] = []
    # The process does not run, so all checks wait.
    grammars = demo_grammars(idle(TurnsConfig(max_waiting=1)), words.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(grammars.check, GOOD, "guided_regex")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RequestError) as caught:
            await grammars.check(BAD, "guided_regex")
        assert (caught.value.status, words) == (503, ["overloaded"])
        assert not caught.value.is_crowded_out, "a hung process would look the same"
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_line_of_one_clients_grammars_is_not_in_front_of_anothers() -> None:
    order: list[str] = []
    async with opened() as (grammars, _), trio.open_nursery() as nursery:

        async def ask(key: str, grammar: Grammar) -> None:
            enter_line(key)
            await grammars.check(grammar, "guided_regex")
            order.append(key)

        for number in range(8):
            regex = Grammar(GrammarKind.REGEX, f"[a-z]{{{number + 1}}}")
            nursery.start_soon(ask, "flood", regex)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, "victim", GOOD)
    assert order.index("victim") <= 2


async def test_a_client_fills_its_own_line_and_one_grammar_at_once_is_one_question() -> None:
    # The process does not run, so all checks wait.
    processes = idle(TurnsConfig(max_waiting_each=1))
    grammars = demo_grammars(processes)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(grammars.check, GOOD, "guided_regex")
        await trio.testing.wait_all_tasks_blocked()
        assert processes.turns.num_waiting == 1
        with pytest.raises(RequestError) as caught:
            await grammars.check(BAD, "guided_regex")
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
        nursery.cancel_scope.cancel()
    assert processes.turns.num_waiting == 0, "no request waits for it"


async def test_nobody_waits_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    grammars = demo_grammars(idle(text_timeout_s=5.0))
    with pytest.raises(RequestError) as caught:
        await grammars.check(GOOD, "guided_regex")
    assert caught.value.status == 503
    assert trio.current_time() < 10


async def test_what_takes_too_long_is_refused_by_name(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with held_work(text_timeout_s=5.0) as held:
        with pytest.raises(RequestError, match="guided_regex takes longer") as caught:
            await demo_grammars(held).check(GOOD, "guided_regex")
    assert (caught.value.status, caught.value.param) == (400, "guided_regex")


def grammar_of(fields: dict[str, Any]) -> Grammar:
    [(name, text)] = fields.items()
    match name:
        case "guided_json":
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(text))
        case "guided_regex":
            return Grammar(GrammarKind.REGEX, text)
        case _:
            return Grammar(GrammarKind.LARK, text)


WALKED = {"ambiguous", "many alternatives", "many branches"}
"""Grammars that exceed the limits within the tokens of a walk."""


@pytest.mark.slow
async def test_what_costs_too_much_within_some_tens_of_tokens_is_refused_by_name() -> None:
    async with opened(COUNTING) as (grammars, _):
        for name in WALKED:
            with pytest.raises(RequestError, match="make it simpler") as caught:
                await grammars.check(grammar_of(costly()[name]), "guided_grammar")
            assert (caught.value.status, caught.value.param) == (400, "guided_grammar"), name


@pytest.mark.slow
async def test_no_real_schema_is_refused_for_its_walks() -> None:
    statements = """
        start: "SELECT" cols "FROM" NAME where? ";"
        cols: "*" | NAME ("," NAME)*
        where: "WHERE" cond (("AND" | "OR") cond)*
        cond: NAME ("=" | "<" | ">") value | NAME "IN" "(" value ("," value)* ")" | "(" cond ")"
        value: NUMBER | NAME
        NAME: /[a-z_]+/
        NUMBER: /[0-9]+/
        %ignore /[ \\n]+/
    """
    objects = [
        {"properties": {"type": {"const": f"kind{n}"}, "v": {}}, "required": ["type"]}
        for n in range(40)
    ]
    real = [
        Grammar(GrammarKind.LARK, statements),
        grammar_of({"guided_json": {"type": "object"}}),
        grammar_of({"guided_json": {"properties": {f"p{n}": {} for n in range(100)}}}),
        grammar_of({"guided_json": {"type": "array", "items": {"anyOf": objects}}}),
        *(grammar_of({"guided_json": random_schema(seed)}) for seed in range(30)),
    ]
    async with opened(COUNTING) as (grammars, words):
        for grammar in real:
            await grammars.check(grammar, "guided_json")
    assert set(words) == {"usable"}


@pytest.mark.parametrize(
    ("tokens", "start", "expected"),
    [
        ({3, 17}, 0, 3),
        ({3, 17}, 3, 3),
        ({3, 17}, 4, 17),
        ({3, 17}, 18, 3),
        ({31}, 31, 31),
        ({0}, 1, 0),
        (set(), 5, None),
    ],
)
def test_a_walk_takes_allowed_tokens(tokens: set[int], start: int, expected: int | None) -> None:
    mask = sum(1 << token_id for token_id in tokens).to_bytes(4, "little")
    assert next_token(mask, start) == expected
