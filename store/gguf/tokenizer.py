"""Translate the tokenizer in a GGUF file's metadata into an equivalent tokenizer.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from triolet.errors import ModelError

from .config import CONTROL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .container import GgufFile

_T = TypeVar("_T", str, int, float)

NORMAL: Final = 1
UNKNOWN: Final = 2
USER_DEFINED: Final = 4
SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""Sentencepiece's spelling of a space."""
_KEY: Final = "tokenizer.ggml."
_ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_TEMPLATE: Final = "tokenizer.chat_template"


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(regex: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


_WORDS_OF_3_DIGITS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_1_DIGIT: Final = _WORDS_OF_3_DIGITS.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2: Final = _byte_level(use_regex=True)
_LLAMA3: Final = _sequence(_split(_WORDS_OF_3_DIGITS), _byte_level(use_regex=False))
_QWEN2: Final = _sequence(_split(_WORDS_OF_1_DIGIT), _byte_level(use_regex=False))
_SMOLLM: Final = _sequence({"type": "Digits", "individual_digits": True}, _GPT2)
PRE_TOKENIZERS: Final = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""Regular expressions that split text before tokenising, by llama.cpp's names for them."""


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: named tokens and chat templates.

    Raises:
      ModelError: a key is broken.
    """
    tokens = _array(file, "tokens", str)
    config: dict[str, Any] = {
        role: tokens[token_id] for role, token_id in _roles(file, len(tokens)).items()
    }
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in file.metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    if templates:
        named = [{"name": name, "template": value} for name, value in templates.items()]
        config["chat_template"] = named
    return config


def tokenizer_document(file: GgufFile) -> dict[str, Any]:
    """Return the content of tokenizer.json.

    Raises:
      ModelError: this kind of tokenizer is not supported, or its arrays are broken.
    """
    kind = file.metadata.get(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{file.path}: {_KEY}model is {kind!r}; supported: gpt2, llama")
    tokens = _array(file, "tokens", str)
    kinds = _array(file, "token_type", int, len(tokens))
    roles = _roles(file, len(tokens))
    is_special = {*roles.values(), *_ids_of(kinds, CONTROL), *_ids_of(kinds, UNKNOWN)}
    is_added = is_special.union(_ids_of(kinds, USER_DEFINED))
    parts = (
        _byte_level_parts(file, tokens, is_added)
        if kind == "gpt2"
        else _sentencepiece_parts(file, tokens, kinds)
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": tokens[token_id],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token_id in is_special,
            }
            for token_id in sorted(is_added)
            if tokens[token_id]
        ],
        "normalizer": None,
        **parts,
        "post_processor": _post_processor(file, kind, tokens, roles),
    }


def _byte_level_parts(file: GgufFile, tokens: Sequence[str], is_added: set[int]) -> dict[str, Any]:
    name = file.metadata.get(f"{_KEY}pre", "default")
    cut = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise ModelError(
            f"{file.path}: {_KEY}pre is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    spelling = _byte_spelling()
    alphabet = frozenset(spelling)
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token_id not in is_added and not alphabet.issuperset(token):
            # The converter left it as plain text.
            token = "".join(spelling[byte] for byte in token.encode())
        vocab.setdefault(token, token_id)
    pairs = [merge.split(" ") for merge in _array(file, "merges", str)]
    for number, pair in enumerate(pairs):
        if len(pair) != 2 or not vocab.keys() >= {*pair, "".join(pair)}:
            raise ModelError(
                f"{file.path}: element {number} of {_KEY}merges is {' '.join(pair)!r}, whose parts "
                f"are not in {_KEY}tokens; fetch the file again"
            )
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        # In Llama 3, a word that is a token stays that token, whatever its merges.
        "ignore_merges": cut is _LLAMA3,
        "vocab": vocab,
        "merges": pairs,
    }
    return {"pre_tokenizer": cut, "decoder": _byte_level(use_regex=True), "model": model}


def _sentencepiece_parts(
    file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    scores = _array(file, "scores", float, len(tokens))
    has_prefix = file.metadata.get(f"{_KEY}add_space_prefix", True)
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    mergeable = {
        token: scores[token_id]
        for token, token_id in vocab.items()
        if kinds[token_id] in (NORMAL, USER_DEFINED)
    }
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _ids_of(kinds, UNKNOWN)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokens[unknown[0]] if unknown else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges_of(mergeable, vocab),
    }
    pre_tokenizer = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "first" if has_prefix else "never",
        "split": False,
    }
    decoder = {"type": "Sequence", "decoders": decoders}
    return {"pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}


def merges_of(scores: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges that correspond to a sentencepiece model's scores, highest priority first.

    Args:
      scores: scores of the tokens that text may become; without control tokens, which a user could
        otherwise write letter by letter.
      vocab: ids of all tokens.
    """
    found = []
    for token, score in scores.items():
        cuts = ((token[:index], token[index:]) for index in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in scores and pair[1] in scores]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, left, right) for left, right in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _post_processor(
    file: GgufFile, kind: object, tokens: Sequence[str], roles: dict[str, int]
) -> dict[str, Any] | None:
    """Return the tokens to add around a prompt without a template."""
    is_llama3 = PRE_TOKENIZERS.get(str(file.metadata.get(f"{_KEY}pre"))) is _LLAMA3
    adds_bos = file.metadata.get(f"{_KEY}add_bos_token", kind == "llama" or is_llama3)
    adds_eos = file.metadata.get(f"{_KEY}add_eos_token", False)
    ends = [
        roles.get(role) if wanted else None
        for role, wanted in (("bos_token", adds_bos), ("eos_token", adds_eos))
    ]
    if ends == [None, None]:
        return None

    def around(sequence: str) -> list[dict[str, Any]]:
        first, last = (
            [] if i is None else [{"SpecialToken": {"id": tokens[i], "type_id": 0}}] for i in ends
        )
        return [*first, {"Sequence": {"id": sequence, "type_id": 0}}, *last]

    special = {
        tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
        for i in ends
        if i is not None
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": special,
    }


def _roles(file: GgufFile, num_tokens: int) -> dict[str, int]:
    """Return the ids of named tokens."""
    roles = {}
    for role, key in _ROLES.items():
        token_id = file.metadata.get(f"{_KEY}{key}")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < num_tokens:
            raise ModelError(
                f"{file.path}: {_KEY}{key} is {token_id!r}; allowed: 0 to {num_tokens - 1}"
            )
        roles[role] = token_id
    return roles


def _array(file: GgufFile, key: str, kind: type[_T], length: int | None = None) -> list[_T]:
    value = file.metadata.get(f"{_KEY}{key}")
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ModelError(
            f"{file.path}: {_KEY}{key} is missing or not an array of one type; convert "
            "the model again with a current llama.cpp"
        )
    if length is not None and len(value) != length:
        raise ModelError(
            f"{file.path}: {_KEY}{key} has {len(value)} elements, {_KEY}tokens has {length}; "
            "fetch the file again"
        )
    return [kind(each) for each in value]


def _ids_of(kinds: Sequence[int], wanted: int) -> list[int]:
    return [token_id for token_id, kind in enumerate(kinds) if kind == wanted]


def _byte_spelling() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2's)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in shown}
    for byte in range(256):
        spelling.setdefault(byte, chr(256 + len(spelling) - len(shown)))
    return [spelling[byte] for byte in range(256)]
