"""Reads a model directory, except the weights: tokenizer files, chat templates, sampling defaults,
embedding settings, and the metadata shown to clients.

Invalid values raise a ModelError that names them. Sampling defaults that `generation_config.json`
does not set are the API's.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tokenizers import Tokenizer

from store.gguf.container import read_gguf
from store.gguf.directory import gguf_weights
from store.model_dir.bounded import (
    MAX_TEMPLATE_BYTES,
    REMEDY,
    count_of,
    end_token_ids,
    read_bytes,
    read_json,
    read_json_value,
    read_text,
)
from store.model_dir.headers import read_header
from triolet.errors import ModelError
from triolet.pooling import Pooling
from triolet.sampling import MIN_PENALTY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


SAMPLING_FILE: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of sampling parameters that a request leaves out.

    Attributes:
      temperature: 0 is greedy.
      top_p: 1 is off.
      top_k: 0 is off.
      min_p: 0 is off.
      repetition_penalty: 1 is off.
      max_new_tokens: maximum tokens of a chat answer; None for as many as fit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


_RANGES: Final[dict[str, tuple[type, Callable[[float], bool], str]]] = {
    "temperature": (float, lambda value: 0 <= value <= 2, "0 to 2"),
    "top_p": (float, lambda value: 0 < value <= 1, "above 0, up to 1"),
    "top_k": (int, lambda value: value >= 0, "0 or more"),
    "min_p": (float, lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": (float, lambda value: MIN_PENALTY <= value <= 10, f"{MIN_PENALTY} to 10"),
    "max_new_tokens": (int, lambda value: value >= 1, "1 or more"),
}


def read_sampling_defaults(model_dir: str | Path) -> SamplingDefaults:
    """Read the defaults that a model directory recommends.

    Raises:
      ModelError: the file is broken, or a value is invalid.
    """
    path = Path(model_dir) / SAMPLING_FILE
    return sampling_defaults(path, read_json(path, is_optional=True))


def sampling_defaults(path: Path, values: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults from a file's values.

    Raises:
      ModelError: a value is invalid.
    """
    found = {name: values[name] for name in _RANGES if values.get(name) is not None}
    for name, value in found.items():
        kind, is_allowed, allowed = _RANGES[name]
        is_number = isinstance(value, int) or (kind is float and isinstance(value, float))
        if isinstance(value, bool) or not is_number or not is_allowed(value):
            raise ModelError(f"{name} in {path} is {value!r}; allowed: {allowed}")
    return SamplingDefaults(**found)


PAGE_FILE: Final = "page.json"
MAX_CARDS: Final = 12
"""More suggestions would not help to choose."""
MAX_CHARS: Final = 400
"""Maximum length of each text."""


@dataclass(frozen=True, slots=True)
class PageWords:
    """Texts for a model's chat page.

    Attributes:
      lead: the sentence below the greeting; None for the page's default.
      cards: (title, question) of each suggestion; empty for the page's defaults.
      has_chat_template: whether the model can chat.
    """

    lead: str | None = None
    cards: tuple[tuple[str, str], ...] = ()
    has_chat_template: bool = True

    def document(self) -> dict[str, Any]:
        """Return it in the form that clients receive."""
        cards = [{"title": title, "question": question} for title, question in self.cards]
        return {"lead": self.lead, "cards": cards, "has_chat_template": self.has_chat_template}


def read_page_words(model_dir: str | Path, *, has_chat_template: bool) -> PageWords:
    """Read the page texts of a model directory, if it has any.

    Raises:
      ModelError: the file is broken.
    """
    path = Path(model_dir) / PAGE_FILE
    fields = read_json(path, is_optional=True)
    lead, cards = fields.get("lead"), fields.get("cards", [])
    if not isinstance(cards, list) or len(cards) > MAX_CARDS:
        raise ModelError(
            f"cards in {path} must be a list of at most {MAX_CARDS} cards; correct or remove it"
        )
    if lead is not None:
        _text(path, "lead", lead)
    pairs = []
    for card in cards:
        if not isinstance(card, dict):
            raise ModelError(f"a card in {path} is not an object; correct or remove it")
        pairs.append(tuple(_text(path, key, card.get(key)) for key in ("title", "question")))
    return PageWords(
        None if lead is None else str(lead),
        tuple((title, question) for title, question in pairs),
        has_chat_template,
    )


def _text(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CHARS:
        raise ModelError(
            f"{key} in {path} is {value!r}; allowed: a text of up to {MAX_CHARS} characters"
        )
    return value


POOLING_MODES: Final = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_max_tokens": Pooling.MAX,
}
NEWER_MODES: Final = {
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.FIRST,
    "max": Pooling.MAX,
}
_MODULE_PATH: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """How a model computes embeddings.

    Attributes:
      pooling: which hidden states are used.
      is_normalized: whether embeddings have length 1.
      size: dimensions of a full embedding; 0 if the directory does not specify it.
      max_input_tokens: the longest input; None for the context length.
      objection: why the model cannot compute embeddings here; empty if it can.
    """

    pooling: Pooling = Pooling.LAST
    is_normalized: bool = True
    size: int = 0
    max_input_tokens: int | None = None
    objection: str = ""


def read_embedding_model(model_dir: str | Path) -> EmbeddingModel:
    """Read embedding settings. Default, without sentence-transformers files: last token, length 1.

    Raises:
      ModelError: a file is broken.
    """
    folder = Path(model_dir)
    config = read_json(folder / "config.json")
    size = config.get("hidden_size")
    plain = EmbeddingModel(
        size=size if isinstance(size, int) else 0,
        max_input_tokens=_max_input_tokens(folder),
    )
    path = folder / "modules.json"
    if not path.exists():
        return plain
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelError(f"{path} is not a list of modules; {REMEDY}")
    pooling, is_normalized, objection = Pooling.LAST, False, ""
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        match kind:
            case "Transformer":
                pass
            case "Normalize":
                is_normalized = True
            case "Pooling":
                found = _pooling(folder, module)
                if isinstance(found, Pooling):
                    pooling = found
                else:
                    objection = found
            case _:
                objection = f"its module {kind[:64]!r} is not supported"
    return EmbeddingModel(pooling, is_normalized, plain.size, plain.max_input_tokens, objection)


def _pooling(folder: Path, module: JsonObject) -> Pooling | str:
    """Return how a pooling module pools, or why that is not supported."""
    name = module.get("path")
    if not isinstance(name, str) or not _MODULE_PATH.fullmatch(name) or name in (".", ".."):
        raise ModelError(
            f"{folder / 'modules.json'} names no folder for its pooling module; {REMEDY}"
        )
    config = read_json(folder / name / "config.json")
    newer = config.get("pooling_mode")
    modes = [newer] if isinstance(newer, str) else newer
    if isinstance(modes, list):
        wanted = [str(mode) for mode in modes]
        known = {mode: NEWER_MODES[mode] for mode in wanted if mode in NEWER_MODES}
    else:
        wanted = [k for k, v in config.items() if k.startswith("pooling_mode_") and v is True]
        known = {mode: POOLING_MODES[mode] for mode in wanted if mode in POOLING_MODES}
    if len(wanted) != 1 or len(known) != 1:
        return f"its pooling, {', '.join(wanted)[:128] or 'none'}, is not supported"
    return known[wanted[0]]


def _max_input_tokens(folder: Path) -> int | None:
    config = read_json(folder / "sentence_bert_config.json", is_optional=True)
    most = config.get("max_seq_length")
    return most if isinstance(most, int) and most > 0 else None


JsonObject: TypeAlias = "dict[str, object]"

DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKEN_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token")


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text-related files of a model directory.

    Attributes:
      tokenizer: the tokenizer of tokenizer.json.
      eos_token_ids: all ids that end a sequence, in ascending order.
      max_model_len: number of positions that the model supports.
      special_tokens: special tokens by role, such as `bos_token`; chat templates use them.
      chat_templates: chat templates by name; empty if the model has none.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read_text_files(model_dir: str | Path) -> TextFiles:
    """Read the text-related files of a model directory.

    Raises:
      ModelError: a file is missing, broken, or contradicts another.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ModelError(f"model directory {folder} does not exist; {REMEDY}")
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json", is_optional=True)
    tokenizer_config = read_json(folder / TOKENIZER_CONFIG, is_optional=True)
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    special_tokens = {
        **_special_tokens(read_json(folder / "special_tokens_map.json", is_optional=True)),
        **_special_tokens(tokenizer_config),
    }
    eos_token_ids = {
        *end_token_ids(folder / "config.json", config),
        *end_token_ids(folder / "generation_config.json", generation),
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
        max_model_len=count_of(folder / "config.json", config, "max_position_embeddings"),
        special_tokens=special_tokens,
        chat_templates=read_chat_templates(folder, tokenizer_config),
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise ModelError(
            f"{path} is missing; save the tokenizer in its fast form "
            "(transformers: tokenizer.save_pretrained writes tokenizer.json)"
        )
    text = read_text(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        # The library raises plain Exception.
        raise ModelError(f"{path} is not a tokenizer: {str(error)[:200]}; {REMEDY}") from error
    # Both are for training batches; here they would truncate or pad prompts.
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


def read_chat_templates(folder: Path, tokenizer_config: JsonObject) -> dict[str, str]:
    """Return templates by name. A separate file takes precedence over tokenizer_config.json, as
    directories that have both expect."""
    path = template_file(folder, tokenizer_config)
    if path.suffix == ".jinja":
        return {DEFAULT_TEMPLATE: read_text(path, MAX_TEMPLATE_BYTES)}
    own = tokenizer_config if path.name == TOKENIZER_CONFIG else read_json(path, is_optional=True)
    value = own.get("chat_template")
    if value is None:
        return {}
    named = {}
    entries = [{"name": DEFAULT_TEMPLATE, "template": value}] if isinstance(value, str) else value
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict):
            entry = {}
        name, template = entry.get("name"), entry.get("template")
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(
                f"chat_template in {path} is neither a string nor a list of objects with name and "
                f"template; {REMEDY}"
            )
        named[name] = template
    num_bytes = sum(len(template.encode()) for template in named.values())
    if num_bytes > MAX_TEMPLATE_BYTES:
        raise ModelError(
            f"chat_template in {path} has {num_bytes} bytes; allowed: up to {MAX_TEMPLATE_BYTES}; "
            f"{REMEDY}"
        )
    return named


def template_file(folder: Path, tokenizer_config: JsonObject) -> Path:
    """Return the file that has a model's chat templates, or would have them."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return jinja
    is_inside = tokenizer_config.get("chat_template") is not None
    return folder / (TOKENIZER_CONFIG if is_inside else "chat_template.json")


_GENERAL: Final = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""Names in config.json, by the names in GGUF files."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model's metadata.

    Attributes:
      family: its architecture, such as `llama`; empty if unknown.
      size_bytes: size of its weights on disk.
      num_parameters: number of parameters.
      dtype: type of most parameters, as safetensors or llama.cpp names it.
      form: file format of the weights, `safetensors` or `gguf`.
      digest: digest of config.json and the headers of all weights, in hex.
      modified_at: modification time of the newest of these files, as a Unix time.
      info: numbers of config.json by their names in GGUF files.
      template: the chat template; empty if there is none.
    """

    family: str = ""
    size_bytes: int = 0
    num_parameters: int = 0
    dtype: str = ""
    form: str = "safetensors"
    digest: str = hashlib.sha256().hexdigest()
    modified_at: float = 0.0
    info: Mapping[str, int | float] = field(default_factory=dict)
    template: str = ""


def read_model_card(model_dir: str | Path) -> ModelCard:
    """Read a model's metadata.

    Raises:
      ModelError: a file is missing or broken.
    """
    folder = Path(model_dir)
    config = read_json(folder / "config.json")
    gguf = gguf_weights(folder)
    weights = sorted(folder.glob("*.safetensors")) if gguf is None else [gguf]
    paths = [folder / "config.json", *weights]
    digest = hashlib.sha256(read_bytes(paths[0]))
    by_dtype: Counter[str] = Counter()
    for path in weights:
        try:
            header, numbers = _safetensors(path) if gguf is None else _gguf(path)
        except ModelError:  # a server needs no weights, and workers report such files
            continue
        digest.update(header)
        by_dtype += numbers
    stats = [path.stat() for path in paths]
    tokenizer_config = read_json(folder / TOKENIZER_CONFIG, is_optional=True)
    templates = read_chat_templates(folder, tokenizer_config)
    return ModelCard(
        family=str(config.get("model_type", ""))[:64],
        size_bytes=sum(stat.st_size for stat in stats[1:]),
        num_parameters=by_dtype.total(),
        dtype=by_dtype.most_common(1)[0][0] if by_dtype else "",
        form="safetensors" if gguf is None else "gguf",
        digest=digest.hexdigest(),
        modified_at=max(stat.st_mtime for stat in stats),
        info=_info(config),
        template="\n".join(templates.values()),
    )


def _info(config: JsonObject) -> dict[str, int | float]:
    found = {}
    for name, key in _GENERAL.items():
        value = config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def _gguf(path: Path) -> tuple[bytes, Counter[str]]:
    """Return the digest of a file's tensor descriptions, and the number of parameters by type."""
    file = read_gguf(path)
    return bytes.fromhex(file.header_digest), file.num_numbers


def _safetensors(path: Path) -> tuple[bytes, Counter[str]]:
    """Return a file's tensor descriptions, and the number of parameters by type."""
    found: Counter[str] = Counter()
    tensors = read_header(path)
    for stored in tensors.values():
        found[stored.dtype] += math.prod(stored.shape)
    shown = [(name, stored.dtype, stored.shape) for name, stored in tensors.items()]
    return repr(shown).encode(), found
