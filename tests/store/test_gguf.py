"""Tests of GGUF files in the store: tokenizer and metadata, and errors for broken or unsupported
files."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from store.gguf.container import read_gguf
from store.gguf.directory import gguf_directory
from store.gguf.tokenizer import PRE_TOKENIZERS, merges_of, tokenizer_document
from tests.gguf_files import (
    ALPHABET,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    byte_vocabulary,
    demo_vocabulary,
    finish,
    write_header,
)
from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = [
    "",
    " ",
    "Hello there, how are you?",
    "  two spaces  and\ttabs\n\nand lines \n",
    "It's what we'll've done; they'RE HERE, I'D say: don't!",
    "1 12 123 1234567 and 3.14159, 2026-11-22, x1y22z333",
    "snake_case CamelCase ÄÖÜ ß é naïve façade",
    "日本語のテキスト 中文 한국어 العربية עברית",
    "emoji 🙂👩‍👩‍👧 \u200d \ufeff zero width",
    "def f(x):\n    return x ** 2  # comment\n",
    "a\u0301 combining e\u0301\u0323 \r\n windows",
    "<|user|>typed<|end|> and <|unknown|>",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep directories made by a test out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(tmp_path: Path, vocabulary: Vocabulary | None = None, **keys: Any) -> Path:  # noqa: ANN401
    path = tmp_path / "tiny.gguf"
    writer = write_header(path, vocabulary or byte_vocabulary(), **keys)
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    finish(writer)
    return path


def more_texts() -> list[str]:
    """Return texts of random characters, words and spaces."""
    numbers = random.Random(5)
    ranges = [(0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x3FF), (0x4E00, 0x4E40), (0x1F600, 0x1F640)]
    spaces = (" ", "  ", "\n", "\t", "")
    texts = []
    for _ in range(300):
        words = []
        for _ in range(numbers.randint(1, 8)):
            low, high = numbers.choice(ranges)
            word = "".join(chr(numbers.randint(low, high)) for _ in range(numbers.randint(1, 6)))
            words += [word, numbers.choice(spaces)]
        texts.append("".join(words))
    return texts


def ours(path: Path) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_document(read_gguf(path))))


@pytest.fixture(scope="module")
def of_transformers() -> Callable[[Path], Tokenizer]:
    """Load a file's tokenizer with transformers. Importing it takes seconds."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    def made(path: Path) -> Tokenizer:
        architecture, fields, _ = get_gguf_tokenizer(str(path))
        tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, fields)[0]
        return tokenizer

    return made


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2"])
def test_byte_level_tokens_are_those_of_transformers(
    tmp_path: Path, pre: str, of_transformers: Callable[[Path], Tokenizer]
) -> None:
    path = written(tmp_path, demo_vocabulary(pre, add_bos_token=False))
    own, other = ours(path), of_transformers(path)
    for text in [*TEXTS, *more_texts()]:
        mine = own.encode(text).ids
        assert mine == other.encode(text, add_special_tokens=False).ids, text
        assert own.decode(mine) == other.decode(mine), text


@pytest.mark.slow
def test_smollm_cuts_digits_before_words_as_its_own_tokenizer_does(
    tmp_path: Path, of_transformers: Callable[[Path], Tokenizer]
) -> None:
    # transformers does not know this name and splits like GPT-2, with a space before a number.
    path = written(tmp_path, demo_vocabulary("smollm"))
    plain = of_transformers(path)
    plain.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    own = ours(path)
    for text in [*TEXTS, *more_texts()]:
        assert own.encode(text).ids == plain.encode(text, add_special_tokens=False).ids, text


def sentencepiece(**keys: Any) -> Vocabulary:  # noqa: ANN401
    """Return a vocabulary with scores, made of words that are merged from the left."""
    pieces = {}
    for word in ("▁the", "▁there", "▁then", "ing", "▁and", "her", "▁hello", "▁▁", "12"):
        for end in range(2, len(word) + 1):
            pieces.setdefault(word[:end])
    letters = sorted({c for piece in pieces for c in piece} | set("abcdefghijklmnopqrstuvwxyz<>/s"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    tokens += ["<user>", *letters]
    kinds += [USER_DEFINED, *[NORMAL] * len(letters)]
    scores += [-1000.0, *(-1000.0 - rank for rank in range(len(letters)))]
    named = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **keys}
    return Vocabulary("llama", tokens, kinds, None, scores, named)


@pytest.mark.slow
def test_sentencepiece_tokens_are_those_of_transformers(
    tmp_path: Path, of_transformers: Callable[[Path], Tokenizer]
) -> None:
    path = written(tmp_path, sentencepiece(add_bos_token=False))
    own, other = ours(path), of_transformers(path)
    for text in [*TEXTS, *more_texts(), "hello there and then", "<user>hello</s>there", "thethere"]:
        mine = own.encode(text).ids
        assert mine == other.encode(text, add_special_tokens=False).ids, text
        assert own.decode(mine) == other.decode(mine), text


def test_a_prompt_begins_with_the_token_that_the_file_says(tmp_path: Path) -> None:
    assert ours(written(tmp_path, sentencepiece())).encode("the").ids[0] == 1
    without = written(tmp_path, sentencepiece(add_bos_token=False, add_eos_token=True))
    assert ours(without).encode("the").ids[-1] == 2
    assert ours(without).encode("the").ids[0] != 1
    assert ours(written(tmp_path, demo_vocabulary("llama-bpe"))).encode("x").ids[0] == 0
    assert ours(written(tmp_path, demo_vocabulary("qwen2"))).encode("x").ids[0] != 0


def test_no_control_token_can_be_merged_from_what_a_user_writes(tmp_path: Path) -> None:
    tokenizer = ours(written(tmp_path, sentencepiece()))
    tokenizer.encode_special_tokens = True
    assert not {0, 1, 2} & set(tokenizer.encode("<s></s><unk>", add_special_tokens=False).ids)
    assert merges_of({"a": -1.0, "b": -2.0, "ab": -3.0}, {"a": 0, "b": 1, "ab": 2}) == [("a", "b")]


def test_templates_named_tokens_ends_and_sampling_are_taken_over(tmp_path: Path) -> None:
    vocabulary = demo_vocabulary("smollm", **{"tokenizer.chat_template": "{{ messages }}"})
    vocabulary.tokens[4] = "<|endoftext|>"
    path = tmp_path / "named.gguf"
    writer = write_header(path, vocabulary)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_tensor("token_embd.weight", np.zeros((2048, 64), np.float32))
    finish(writer)
    directory = gguf_directory(path, {"generation_config.json": {"top_p": 0.9}, "page.json": {}})
    read = {p.name: json.loads(p.read_text()) for p in directory.glob("*.json")}
    assert directory.name == "named"
    assert read["config.json"]["architectures"] == ["LlamaForCausalLM"]
    assert read["config.json"]["eos_token_id"] == [1, 4]
    assert read["config.json"]["tie_word_embeddings"] is True
    assert read["generation_config.json"] == {
        "eos_token_id": [1, 4],
        "temperature": 0.5,
        "top_p": 0.9,
    }
    assert read["tokenizer_config.json"]["eos_token"] == "<|end|>"
    assert read["tokenizer_config.json"]["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"}
    ]
    assert read["page.json"] == {}


def test_a_directory_is_written_once_and_goes_with_its_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    directory = gguf_directory(path)
    stamp = (directory / "tokenizer.json").stat().st_mtime_ns
    assert gguf_directory(path) == directory
    assert (directory / "tokenizer.json").stat().st_mtime_ns == stamp
    path.rename(tmp_path / "moved.gguf")
    moved = gguf_directory(tmp_path / "moved.gguf")
    assert moved != directory
    assert not directory.exists()
    assert [p.name for p in moved.parents[1].iterdir()] == [moved.parent.name]


def test_directories_that_another_process_removes_meanwhile_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [tmp_path / name for name in ("one", "two", "three")]
    for folder in gone:
        folder.mkdir()
        directory_of = gguf_directory(written(folder))
    for folder in gone:
        (folder / "tiny.gguf").unlink()
    caches = directory_of.parents[1]
    remove = shutil.rmtree

    def remove_all(_: Path, ignore_errors: bool) -> None:
        for path in tuple(caches.iterdir()):
            remove(path, ignore_errors)

    monkeypatch.setattr("store.gguf.directory.shutil.rmtree", remove_all)
    assert gguf_directory(written(tmp_path)).is_dir()
    assert len(list(caches.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        gguf_directory(written(tmp_path))


def test_a_file_that_is_cut_off_anywhere_is_refused_with_the_place(tmp_path: Path) -> None:
    whole = written(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    cuts = [*range(1, 200, 7), *range(200, len(whole) - 1, 997), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"cut.gguf .*(byte|begins|ends at)"):
            read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is empty; fetch the file again"):
        read_gguf(path)


def test_a_file_of_random_damage_is_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    whole, numbers = written(tmp_path).read_bytes(), random.Random(3)
    header = len(whole) - 256 * 64 * 4
    path = tmp_path / "damaged.gguf"
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(numbers.randint(1, 4)):
            damaged[numbers.randrange(header)] = numbers.randrange(256)
        path.write_bytes(damaged)
        with suppress(ModelError):
            tokenizer_document(read_gguf(path))


@pytest.mark.parametrize(
    ("at", "content", "words"),
    [
        (0, b"PK\x03\x04", "does not begin with the letters GGUF: it is not a GGUF file"),
        (4, b"\x00\x00\x00\x03", "big-endian; supported: little-endian"),
        (4, b"\x01\x00\x00\x00", "of version 1; supported"),
        (8, b"\xff" * 8, r"18446744073709551615 tensors are announced at byte 8"),
        (16, b"\xff" * 4, r"4294967295 keys of metadata are announced at byte 16"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    tmp_path: Path, at: int, content: bytes, words: str
) -> None:
    path = written(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[at : at + len(content)] = content
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=words):
        read_gguf(path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_count": 8}, r"llama.expert_count is 8, .*allowed: 0"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8; supported: the size of a"),
        ({"attention.head_count": None}, "llama.attention.head_count is None"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'; supported: none"),
        ({"architecture": "gemma3"}, "general.architecture is 'gemma3'; supported: llama, qwen2"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        gguf_directory(written(tmp_path, **keys))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
        ({"keys": {"eos_token_id": 1, "pre": "dbrx"}}, r"tokenizer.ggml.pre is 'dbrx'; supported"),
        ({"kinds": [NORMAL] * 9}, r"token_type has 9 elements, tokenizer.ggml.tokens has 256"),
        ({"merges": ["! ☃"]}, r"element 0 of tokenizer.ggml.merges is '! ☃'"),
        ({"keys": {}}, "eos_token_id is missing, so no answer would end"),
        ({"keys": {"eos_token_id": 256}}, "eos_token_id is 256; allowed: 0 to 255"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_refused_by_key_and_value(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        gguf_directory(written(tmp_path, byte_vocabulary()._replace(**change)))


def test_every_pre_tokenizer_keeps_every_byte(tmp_path: Path) -> None:
    assert len(set(ALPHABET)) == 256
    for pre in PRE_TOKENIZERS:
        tokenizer = ours(written(tmp_path, demo_vocabulary(pre, add_bos_token=False)))
        for text in TEXTS[:-1]:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text, (pre, text)


def test_a_part_of_a_split_model_names_what_joins_them(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = write_header(path, byte_vocabulary())
    writer.add_uint16("split.count", 3)
    finish(writer)
    with pytest.raises(ModelError, match=r"one of 3 parts .*llama-gguf-split --merge"):
        read_gguf(path)
