"""Tests of stop strings: the same text is shown whatever pieces the output arrives in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.contract.generation import Delta
from server.text.detokenizer import StopStrings


def run(pieces: list[str], stop: tuple[str, ...], *, include_stop: bool = False) -> tuple[str, str]:
    """Return all shown text, and the stop string that ended it (empty for none)."""
    stage = StopStrings(stop, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        shown += push(stage, piece)
        if stage.matched is not None:
            return shown, stage.matched
    return shown + "".join(event.text for event in stage.finish() if isinstance(event, Delta)), ""


def push(stage: StopStrings, piece: str) -> str:
    """Push a token's text; return the text that is passed on."""
    [event] = stage.push(Delta(piece, (1,)))
    assert isinstance(event, Delta)
    assert event.token_ids == (1,), "text may be held back, tokens never"
    return event.text


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "matched"),
    [
        (["hello ", "world"], ("lo w",), "hel", "lo w"),
        (["hello ", "world"], ("xyz",), "hello world", ""),
        (["a", "b", "a", "b", "c"], ("abc",), "ab", "abc"),
        (["abcd"], ("bc", "abcd"), "a", "bc"),
        (["xab"], ("b", "ab"), "x", "ab"),
        (["END"], ("END",), "", "END"),
        (["EN"], ("END",), "EN", ""),
        (["no stops"], (), "no stops", ""),
        (["caf", "é\n", "\nx"], ("\n\n",), "café", "\n\n"),
    ],
)
def test_text_ends_before_the_stop_string_that_is_complete_first(
    pieces: list[str], stop: tuple[str, ...], shown: str, matched: str
) -> None:
    assert run(pieces, stop) == (shown, matched)


def test_the_stop_string_can_be_kept() -> None:
    assert run(["one two", " three"], ("two t",), include_stop=True) == ("one two t", "two t")


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stage = StopStrings(("###", "\nUser:"))
    assert push(stage, "Hi there") == "Hi there"
    assert push(stage, " #") == " "
    assert push(stage, "1 is") == "#1 is"
    assert push(stage, "\nUse") == ""
    assert push(stage, "ful") == "\nUseful"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("",))


ALPHABET = st.text("ab", max_size=12)


@given(st.lists(ALPHABET, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_how_text_is_cut_into_pieces_changes_nothing(pieces: list[str], stops: list[str]) -> None:
    stop = tuple(stops)
    whole = "".join(pieces)
    assert run(pieces, stop) == run([whole], stop) == run(list(whole), stop)
