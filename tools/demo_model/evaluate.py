"""`python -m tools.demo_model.evaluate DIR`: measure greedy accuracy on held-out examples.

Prints a table and writes `accuracy.json` next to the weights. Half of the questions open a
conversation; the others come after a few exchanges. A reply is correct if it contains every
expected string as whole words and ends by itself.

With `--mistakes FILE` it asks all small sums instead, and writes those that training should
practise (`train.py --practise FILE`).
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import arithmetic, facts, hard_sums, smalltalk, stories, story_talk
from .corpus import DEFAULT_SHARES, FOLLOWS, SKILLS, conversation, typed
from .generate import Message, Speaker
from .samples import Exchange, Split

SEED = 20_260_101
Sum = tuple[int, str, int]
WORDINGS = ("{a} {op} {b}", "What is {a} {op} {b}?")


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out exchange at the end of a conversation."""

    exchange: Exchange
    messages: tuple[Message, ...]


def occurs(wanted: str, reply: str) -> bool:
    """Return whether one of `a|b` occurs in a reply as whole words."""
    return any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", reply, re.IGNORECASE)
        for word in wanted.split("|")
    )


def is_right(exchange: Exchange, reply: str) -> bool:
    """Return whether a reply is correct."""
    if reply.endswith("…") or not reply.strip():
        return False
    if exchange.skill == stories.SKILL and not (
        reply.endswith((".", "!", "?", '"')) and len(reply.split()) >= 40
    ):
        return False
    for wanted in exchange.expect:
        if wanted.startswith("topic:"):
            if not smalltalk.matches_topic(wanted[6:], reply):
                return False
        elif not occurs(wanted, reply):
            return False
    return True


def _as_messages(exchange: Exchange) -> list[Message]:
    return [
        {"role": "user", "content": exchange.user},
        {"role": "assistant", "content": exchange.reply},
    ]


def _names(rng: Random) -> Question:
    told = smalltalk.told_name(rng, Split.HELD_OUT)
    between = conversation(rng, {"facts": 0.5, "arithmetic": 0.5}, 30).exchanges
    asked = smalltalk.ask_name(rng, told.memo["me"])
    told, asked = (
        replace(told, user=typed(rng, told.user)),
        replace(asked, user=typed(rng, asked.user)),
    )
    before = [
        m
        for e in (told, *between[:2])
        if e.skill != asked.skill or e is told
        for m in _as_messages(e)
    ]
    return Question(asked, (*before, {"role": "user", "content": asked.user}))


def _second(rng: Random, skill: str) -> Question:
    """Draw a question about a held-out story, or an answer to the model's quiz question."""
    if skill == facts.QUIZ:
        first = facts.quiz(rng, Split.HELD_OUT)
        asked = facts.guess(rng, first, Split.HELD_OUT)
    else:
        first = stories.draw(rng, Split.HELD_OUT)
        asked = story_talk.about(rng, first, Split.HELD_OUT)
    asked = replace(asked, user=typed(rng, asked.user))
    return Question(
        asked,
        (
            *_as_messages(replace(first, user=typed(rng, first.user))),
            {"role": "user", "content": asked.user},
        ),
    )


def question(rng: Random, skill: str) -> Question:
    """Draw a held-out question of a skill, at the start of a conversation or within one."""
    if skill == smalltalk.NAMES:
        return _names(rng)
    if skill in (facts.QUIZ, story_talk.SKILL):
        return _second(rng, skill)
    messages: list[Message] = []
    exchange = SKILLS[skill](rng, Split.HELD_OUT)
    if rng.random() < 0.5:
        before = conversation(rng, DEFAULT_SHARES, 60, 0.0)
        if before.system:
            messages.append({"role": "system", "content": before.system})
        for earlier in before.exchanges[:3]:
            messages += _as_messages(earlier)
        last = before.exchanges[min(2, len(before.exchanges) - 1)]
        if last.skill == skill and skill in FOLLOWS and last.memo:
            exchange = FOLLOWS[skill](rng, last, Split.HELD_OUT)
    exchange = replace(exchange, user=typed(rng, exchange.user))
    return Question(exchange, (*messages, {"role": "user", "content": exchange.user}))


def questions(skill: str, count: int) -> list[Question]:
    """Draw questions of a skill, the same in every run."""
    rng = Random(f"{SEED}:{skill}")
    return [question(rng, skill) for _ in range(count)]


def measure(
    directory: Path, count: int, wrong_shown: int = 0, only: str = ""
) -> dict[str, dict[str, float]]:
    """Return the correct answers, questions and accuracy per skill."""
    speaker = Speaker(directory)
    result: dict[str, dict[str, float]] = {}
    for skill in (*SKILLS, story_talk.SKILL):
        if only and skill != only:
            continue
        asked = questions(skill, count)
        replies = speaker.replies([q.messages for q in asked])
        wrong = [(q, r) for q, r in zip(asked, replies, strict=True) if not is_right(q.exchange, r)]
        right = count - len(wrong)
        result[skill] = {"right": right, "asked": count, "accuracy": round(right / count, 4)}
        for q, reply in wrong[:wrong_shown]:
            sys.stdout.write(
                f"[{skill}] {q.exchange.user!r} wants {q.exchange.expect}: {reply!r}\n"
            )
        sys.stdout.write(f"{skill}: {right}/{count}\n")
        sys.stdout.flush()
    return result


def small_sums() -> Iterator[Sum]:
    """Yield all sums within the model's tables and just beyond them."""
    for a in range(100):
        for b in range(100):
            yield a, "+", b
            yield a, "-", b
    for a in range(31):
        for b in range(31):
            yield a, "x", b
    for a in range(145):
        for b in range(1, 13):
            yield a, "/", b


def is_honest(reply: str, a: int, op: str, b: int) -> bool:
    """Return whether a reply has the correct result, or declines without a result."""
    if reply.startswith(hard_sums.REPLY):
        return True
    return arithmetic.has_answer(a, op, b) and reply.startswith(
        f"{a} {op} {b} = {arithmetic.value(a, op, b)}."
    )


def find_mistakes(directory: Path) -> list[Sum]:
    """Return the sums that the model gets wrong, or declines although it should know them."""
    speaker, sums, found = Speaker(directory), list(small_sums()), set[Sum]()
    for wording in WORDINGS:
        asked = [
            [{"role": "user", "content": wording.format(a=a, op=op, b=b)}] for a, op, b in sums
        ]
        for one, reply in zip(sums, speaker.replies(asked, 24, 256), strict=True):
            is_lost = reply.startswith(hard_sums.REPLY) and arithmetic.has_answer(*one)
            if is_lost or not is_honest(reply, *one):
                found.add(one)
    return sorted(found)


def main(
    directory: Annotated[Path, typer.Argument(help="Model directory.")] = Path("triolet/demo"),
    count: Annotated[int, typer.Option(help="Questions per skill.")] = 400,
    show_wrong: Annotated[int, typer.Option(help="Wrong replies to show per skill.")] = 0,
    only: Annotated[str, typer.Option(help="Measure only this skill; writes nothing.")] = "",
    mistakes: Annotated[str, typer.Option(help="Write wrong sums to this file instead.")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Measure the demo model and write accuracy.json."""
    torch.set_num_threads(threads)
    if mistakes:
        Path(mistakes).write_text(json.dumps(find_mistakes(directory)) + "\n")
        return
    result = measure(directory, count, show_wrong, only)
    table = Table("skill", "right", "asked", "accuracy")
    for skill, row in result.items():
        table.add_row(skill, f"{row['right']:.0f}", f"{row['asked']:.0f}", f"{row['accuracy']:.1%}")
    Console().print(table)
    if not only:
        (directory / "accuracy.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
