"""Reads what a model directory says about text: tokenizer, end tokens, context, chat template.

Knows the files of a Hugging Face directory and their older and newer forms; refuses to tokenise,
to render, and to look at weights. Whatever is missing or broken is a ModelError that names the file
and the remedy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from tokenizers import Tokenizer

from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

JsonObject: TypeAlias = "dict[str, object]"

DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"
SPECIAL_TOKEN_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token")
REMEDY: Final = "point MODEL at a complete Hugging Face directory, or download it again"


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The textual side of a model directory.

    Attributes:
      tokenizer: as tokenizer.json describes it.
      eos_token_ids: every id that ends a sequence, in ascending order.
      max_model_len: positions that the model was made for.
      special_tokens: by role, such as `bos_token`; what chat templates refer to.
      chat_templates: by name; empty if the model has none.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read_text_files(model_dir: str | Path) -> TextFiles:
    """Read a model directory.

    Raises:
      ModelError: a file is missing, is not what its name says, or contradicts another.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ModelError(f"model directory {folder} does not exist; {REMEDY}")
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json", is_optional=True)
    tokenizer_config = read_json(folder / "tokenizer_config.json", is_optional=True)
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    special_tokens = {
        **_special_tokens(read_json(folder / "special_tokens_map.json", is_optional=True)),
        **_special_tokens(tokenizer_config),
    }
    eos_token_ids = {
        *_eos_ids(config, folder / "config.json"),
        *_eos_ids(generation, folder / "generation_config.json"),
    }
    eos_of_tokenizer = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    if eos_of_tokenizer is not None:
        eos_token_ids.add(eos_of_tokenizer)
    if not eos_token_ids:
        raise ModelError(
            f"no end token: neither config.json nor generation_config.json in {folder} has "
            f"eos_token_id, and tokenizer_config.json no eos_token; {REMEDY}"
        )
    return TextFiles(
        tokenizer=tokenizer,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        max_model_len=_max_model_len(config, folder / "config.json"),
        special_tokens=special_tokens,
        chat_templates=read_chat_templates(folder, tokenizer_config),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}; {REMEDY}") from error


def read_json(path: Path, *, is_optional: bool = False) -> JsonObject:
    """Return the object in a file.

    Raises:
      ModelError: it is missing and not optional, is no JSON, or holds something else.
    """
    if is_optional and not path.exists():
        return {}
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object; {REMEDY}")
    return value


def read_json_value(path: Path) -> object:
    """Return what a file holds.

    Raises:
      ModelError: it is missing, or no JSON.
    """
    if not path.exists():
        raise ModelError(f"{path} is missing; {REMEDY}")
    try:
        value: object = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}; {REMEDY}") from error
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise ModelError(
            f"{path} is missing; save the tokenizer in its fast form "
            "(transformers: tokenizer.save_pretrained writes tokenizer.json)"
        )
    text = _read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        # The library raises plain Exception, nothing narrower.
        raise ModelError(f"{path} is not a tokenizer: {str(error)[:200]}; {REMEDY}") from error
    # Both are meant for training batches; here they would cut prompts or add tokens to them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: JsonObject) -> dict[str, str]:
    """Return the named tokens; each is a string, or an object with the string in `content`."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            found[name] = value
    return found


def _eos_ids(config: JsonObject, path: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"eos_token_id in {path} is {value!r}; allowed: an id or a list of ids")
    return tuple(ids)


def _max_model_len(config: JsonObject, path: Path) -> int:
    value = config.get("max_position_embeddings")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"max_position_embeddings in {path} is {value!r}; allowed: at least 1")
    return value


def read_chat_templates(folder: Path, tokenizer_config: JsonObject) -> dict[str, str]:
    """Return templates by name. A file of its own wins over tokenizer_config.json, as it does in
    the directories that have both."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return {DEFAULT_TEMPLATE: _read_text(jinja)}
    value = tokenizer_config.get("chat_template")
    if value is None:
        older_file = folder / "chat_template.json"
        value = read_json(older_file, is_optional=True).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    named = {}
    for entry in value if isinstance(value, list) else [None]:
        if not isinstance(entry, dict):
            entry = {}
        name, template = entry.get("name"), entry.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(
                f"chat_template in {folder / 'tokenizer_config.json'} is neither a string nor a "
                f"list of objects with name and template; {REMEDY}"
            )
        named[name] = template
    return named
