"""Tests of the generator of training text: a seed determines the text, and held-out questions never
appear in it."""

from itertools import islice
from random import Random

import pytest

from tools.demo_model import facts, story_talk
from tools.demo_model.corpus import SKILLS, conversations, typed
from tools.demo_model.evaluate import is_right, occurs, questions
from tools.demo_model.samples import Exchange, Split, article, fill, is_held_out, unmark


def test_the_same_seed_writes_the_same_conversations() -> None:
    assert list(islice(conversations(7), 50)) == list(islice(conversations(7), 50))


def test_another_seed_writes_others() -> None:
    assert list(islice(conversations(7), 50)) != list(islice(conversations(8), 50))


def test_conversations_hold_no_slot_marks() -> None:
    for talk in islice(conversations(3), 300):
        for exchange in talk.exchanges:
            assert not {"\x01", "\x02", "{", "}"} & set(exchange.user + exchange.reply) - set("{}")
            assert exchange.user.strip()
            assert exchange.reply.strip()


@pytest.mark.parametrize("skill", ["facts", "spelling", "reversing", "counting", "stories", "quiz"])
def test_training_never_sees_a_held_out_combination(skill: str) -> None:
    rng = Random(5)
    trained = {SKILLS[skill](rng, Split.TRAIN).key for _ in range(400)}
    held_out = {SKILLS[skill](rng, Split.HELD_OUT).key for _ in range(100)}
    assert not trained & held_out
    assert not any(is_held_out(key) for key in trained if key)
    assert all(is_held_out(key) for key in held_out)


@pytest.mark.parametrize("skill", [*SKILLS, story_talk.SKILL])
def test_the_generators_own_reply_is_judged_right(skill: str) -> None:
    for asked in questions(skill, 40):
        assert is_right(asked.exchange, asked.exchange.reply), asked.exchange


@pytest.mark.parametrize("skill", [*SKILLS, story_talk.SKILL])
def test_held_out_questions_are_the_same_in_every_run(skill: str) -> None:
    assert questions(skill, 10) == questions(skill, 10)


def test_a_reply_without_the_answer_is_judged_wrong() -> None:
    asked = Exchange("arithmetic", "3 + 4", "3 + 4 = 7.", ("3 + 4 = 7",))
    assert not is_right(asked, "3 + 4 = 71.")
    assert not is_right(asked, "")
    assert not is_right(asked, "3 + 4 = 7…")


def test_an_expected_word_is_found_whole_only() -> None:
    assert occurs("storm|rain", "Then came the Rain.")
    assert not occurs("rain", "A train came.")


def test_slips_leave_the_slots_alone() -> None:
    rng = Random(2)
    for _ in range(300):
        assert (
            "zebra" in typed(rng, fill("Please tell me about the word {w} now", w="zebra")).lower()
        )


def test_unmark_undoes_the_marks() -> None:
    assert unmark(fill("Spell {w}.", w="cat")) == "Spell cat."


@pytest.mark.parametrize(
    ("noun", "said"), [("owl", "an owl"), ("unicorn", "a unicorn"), ("fox", "a fox")]
)
def test_article_follows_the_sound(noun: str, said: str) -> None:
    assert article(noun) == said


def test_facts_ask_with_the_right_article() -> None:
    rng = Random(4)
    for _ in range(500):
        drawn = facts.draw(rng, Split.TRAIN)
        assert "a owl" not in unmark(drawn.user) + drawn.reply
        assert "a ant" not in unmark(drawn.user) + drawn.reply
