"""Tests of whose a request is: the user that it names, or its first user turn."""

from __future__ import annotations

from typing import Any

import pytest

from server.rollouts.conversations import MAX_USER_CHARS, first_turn, named_user

TEXT = {"type": "text", "text": "Hi"}
SYSTEM = {"role": "system", "content": "only this"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"messages": [SYSTEM, {"role": "user", "content": "Hi"}]},
            "Hi",
        ),
        ({"messages": [{"role": "user", "content": [TEXT, {"type": "text", "text": "!"}]}]}, "Hi"),
        ({"messages": [SYSTEM]}, "only this"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ""),
        ({"messages": []}, ""),
        ({"input": "Hi"}, "Hi"),
        ({"input": [{"type": "message", "role": "user", "content": "Hi"}]}, "Hi"),
        ({"input": ["Hi", "Ho"]}, "Hi"),
        ({"prompt": "Hi"}, "Hi"),
        ({"prompt": [[5, 6], [7]]}, "[5, 6]"),
        ({"prompt": list(range(100))}, repr(list(range(64)))),
        ({"query": "Hi", "documents": ["a"]}, "Hi"),
        ({"text_1": ["Hi"], "text_2": "Ho"}, "Hi"),
        ({"prompt": 7}, ""),
        ({}, ""),
        ({"prompt": "x" * 5000}, "x" * MAX_USER_CHARS),
    ],
)
def test_the_first_turn_of_any_dialect(body: dict[str, Any], text: str) -> None:
    assert first_turn(body) == text


def test_what_grows_behind_the_first_turn_changes_nothing() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    more = [*turns, {"role": "user", "content": "And now?"}]
    assert first_turn({"messages": turns[:1]}) == first_turn({"messages": more}) == "Hi"


def test_a_name_that_is_no_text_counts_as_none_and_a_long_one_is_cut() -> None:
    other: dict[str, Any] = {"user": None, "safety_identifier": 3, "metadata": {"user_id": []}}
    assert named_user(other, "", is_messages=True) == ""
    other = {"metadata": "no object", "safety_identifier": "s"}
    assert named_user(other, "session", is_messages=True) == "s"
    assert named_user({}, "session") == "session"
    assert named_user({"user": "u" * 5000}, "") == "u" * MAX_USER_CHARS


def test_metadata_name_a_user_only_in_the_messages_api() -> None:
    body = {"metadata": {"user_id": "u"}}
    assert named_user(body, "session", is_messages=True) == "u"
    assert named_user(body, "session") == "session"
