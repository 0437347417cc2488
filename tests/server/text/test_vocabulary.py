"""Tests of the texts of single tokens in a tokenizer's vocabulary."""

from __future__ import annotations

from server.text.detokenizer import Vocabulary
from tests.server.tiny_text import EOS_ID, tiny_tokenizer

from .test_detokenizer import WORD_START_A, sentencepiece_like


def test_byte_level_tokens_are_their_bytes() -> None:
    vocabulary = Vocabulary(tiny_tokenizer())
    assert [vocabulary.token(byte).raw for byte in range(256)] == [bytes([b]) for b in range(256)]
    assert vocabulary.token(ord(" ")).text == " "
    assert vocabulary.token(0xC3).text == "\ufffd"


def test_special_tokens_are_their_names_and_unknown_ids_are_nothing() -> None:
    vocabulary = Vocabulary(tiny_tokenizer())
    assert vocabulary.token(EOS_ID) == ("<|end|>", b"<|end|>")
    assert vocabulary.token(9999) == ("", b"")


def test_word_starts_keep_their_space_and_fallback_bytes_are_bytes() -> None:
    vocabulary = Vocabulary(sentencepiece_like())
    assert vocabulary.token(WORD_START_A) == (" a", b" a")
    assert vocabulary.token(1 + 0xE9) == ("\ufffd", b"\xe9")
    assert vocabulary.token(258) == ("a", b"a")


def test_the_longest_token_bounds_all() -> None:
    vocabulary = Vocabulary(tiny_tokenizer())
    assert vocabulary.longest_token_bytes >= max(len(vocabulary.token(i).raw) for i in range(259))
