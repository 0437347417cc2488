"""Tests of the incremental detokenizer: the pieces together equal the text of all ids."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from server.text.detokenizer import MAX_PENDING_TOKENS, Detokenizer, Vocabulary
from tests.server.tiny_text import BOS_ID, EOS_ID, tiny_tokenizer

BYTES = tiny_tokenizer()
DATA = Path(__file__).parents[4] / "shared/data"
STORIES = DATA / "checkpoints/stories260K/tokenizer.json"
AWKWARD_TEXTS = DATA / "vectors/llama-spm.inp"


def pieces_of(
    tokenizer: Tokenizer,
    ids: list[int],
    *,
    prompt_ids: tuple[int, ...] = (),
    skip_special_tokens: bool = True,
    anchor: str = "a",
    is_shortened: bool = True,
) -> list[str]:
    anchor_id = tokenizer.token_to_id(anchor)
    anchor_ids = [] if anchor_id is None else [anchor_id]
    if is_shortened:
        stream = Detokenizer(
            tokenizer,
            anchor_ids,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            vocabulary=Vocabulary(tokenizer),
        )
    else:
        stream = Detokenizer(
            tokenizer, anchor_ids, prompt_ids, skip_special_tokens=skip_special_tokens
        )
    return [stream.push(i) for i in ids] + [stream.flush()]


def sentencepiece_like() -> Tokenizer:
    """Return a tokenizer with byte fallback and word-start marks, as Llama 2 has."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "b"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


SPM = sentencepiece_like()
WORD_START_A = 259


@given(st.text(max_size=30))
def test_any_text_comes_out_whole(text: str) -> None:
    assert "".join(pieces_of(BYTES, list(text.encode()))) == text


@given(st.lists(st.integers(0, 258), max_size=50), st.booleans())
def test_any_ids_give_what_decoding_all_at_once_gives(ids: list[int], skip: bool) -> None:
    pieces = pieces_of(BYTES, ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens=skip)


def test_half_a_character_is_never_shown_before_its_end() -> None:
    pieces = pieces_of(BYTES, list("é🚂日".encode()))
    assert [piece for piece in pieces if piece] == ["é", "🚂", "日"]


def test_half_a_character_at_the_end_is_shown_as_unreadable() -> None:
    pieces = pieces_of(BYTES, list("x🚂".encode())[:-1])
    assert pieces[-1] == "\ufffd"


def test_special_tokens_are_shown_only_on_demand() -> None:
    ids = [BOS_ID, *b"hi", EOS_ID]
    assert "".join(pieces_of(BYTES, ids)) == "hi"
    assert "".join(pieces_of(BYTES, ids, skip_special_tokens=False)) == "<|bos|>hi<|end|>"


def test_the_first_word_keeps_its_space_behind_a_prompt() -> None:
    assert "".join(pieces_of(SPM, [WORD_START_A], prompt_ids=(258,))) == " a"
    assert "".join(pieces_of(SPM, [WORD_START_A])) == "a"


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    prompt = tuple("ab🚂".encode()[:-2])
    assert "".join(pieces_of(BYTES, list(b"cd"), prompt_ids=prompt)) == "cd"


def test_a_byte_that_fits_nothing_does_not_end_the_stream() -> None:
    byte = {value: 1 + value for value in range(256)}
    ids = [byte[0x41], byte[0xFF], WORD_START_A, byte[0xC3], byte[0xA9], 260]
    assert "".join(pieces_of(SPM, ids)) == "A\ufffd aéb"


@given(st.lists(st.integers(0, 260), max_size=60))
def test_noise_of_a_model_never_raises(ids: list[int]) -> None:
    for tokenizer in (SPM, BYTES):
        pieces = pieces_of(tokenizer, ids)
        assert len(pieces) == len(ids) + 1


@given(st.lists(st.integers(0, 260), max_size=60), st.lists(st.integers(0, 260), max_size=9))
def test_what_needs_no_decoder_is_what_the_decoder_says(ids: list[int], prompt: list[int]) -> None:
    for skip in (True, False):
        with_all = pieces_of(
            BYTES, ids, prompt_ids=tuple(prompt), skip_special_tokens=skip, is_shortened=False
        )
        shortened = pieces_of(BYTES, ids, prompt_ids=tuple(prompt), skip_special_tokens=skip)
        assert shortened == with_all


def test_only_bytes_need_no_decoder() -> None:
    assert all(Vocabulary(SPM).plain_text(token_id) is None for token_id in range(262))
    plain = Vocabulary(BYTES).plain_text
    assert sum(plain(token_id) is not None for token_id in range(256)) >= 128
    assert plain(EOS_ID) is None


def test_noise_without_a_border_is_not_held_back_for_ever() -> None:
    pieces = pieces_of(BYTES, [0x80] * (3 * MAX_PENDING_TOKENS))
    assert sum(1 for piece in pieces if piece) == 3
    assert "".join(pieces) == "\ufffd" * (3 * MAX_PENDING_TOKENS)


@pytest.mark.skipif(not STORIES.exists(), reason="the stories260K checkpoint is not here")
@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_a_real_sentencepiece_vocabulary_streams_exactly(seed: int) -> None:
    tokenizer = Tokenizer.from_file(str(STORIES))
    words = "Once upon a time there was a naïve lion 🦁, it's said: «привет»\n  two  spaces".split(
        " "
    )
    text = " ".join(random.Random(seed).choices(words, k=12))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.skipif(not AWKWARD_TEXTS.exists(), reason="the awkward texts are not here")
def test_awkward_texts_stream_exactly() -> None:
    tokenizers = [BYTES]
    if STORIES.exists():
        tokenizers.append(Tokenizer.from_file(str(STORIES)))
    texts = AWKWARD_TEXTS.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    assert len(texts) > 30
    for tokenizer in tokenizers:
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
