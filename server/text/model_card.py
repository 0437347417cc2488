"""What a model directory says of the model itself: family, sizes, the form of its weights.

For clients that show models (`/api/tags`, `/api/show`); nothing is computed by it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.errors import ModelError
from triolet.gguf.container import read_gguf
from triolet.gguf.directory import gguf_weights
from triolet.units import MIB

from .model_files import read_chat_templates, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .model_files import JsonObject

MAX_HEADER_BYTES: Final = 100 * MIB
"""Of a file of weights: the bound of its format."""
_LENGTH_BYTES: Final = 8
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
"""By what GGUF files call them: names in config.json."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model in a few words and numbers.

    Attributes:
      family: its architecture, such as `llama`; empty if the directory does not say.
      size_bytes: of its weights on disk.
      num_parameters: numbers in them.
      dtype: of most of these, as safetensors or llama.cpp calls it.
      form: of the files that hold them, `safetensors` or `gguf`.
      digest: of config.json and the headers of all weights, in hex.
      modified_at: when the newest of these files was written, as a Unix time.
      info: numbers of config.json by the names that GGUF files have for them.
      template: the chat template's text; empty if there is none.
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
    """Read a model directory.

    Raises:
      ModelError: a file is missing or broken.
    """
    folder = Path(model_dir)
    config = read_json(folder / "config.json")
    gguf = gguf_weights(folder)
    weights = sorted(folder.glob("*.safetensors")) if gguf is None else [gguf]
    paths = [folder / "config.json", *weights]
    digest = hashlib.sha256(paths[0].read_bytes())
    by_dtype: Counter[str] = Counter()
    for path in weights:
        header, numbers = _safetensors(path) if gguf is None else _gguf(path)
        digest.update(header)
        by_dtype += numbers
    stats = [path.stat() for path in paths]
    tokenizer_config = read_json(folder / "tokenizer_config.json", is_optional=True)
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
    """Return the digest of what a file says of its tensors, and how many numbers of each type it
    holds; nothing of a broken one, as of the other form."""
    try:
        file = read_gguf(path)
    except ModelError:
        return b"", Counter()
    return bytes.fromhex(file.header_digest), file.num_numbers


def _safetensors(path: Path) -> tuple[bytes, Counter[str]]:
    """Return what a file says of its tensors, and how many numbers of each type it holds."""
    header = _header(path)
    return header, _numbers(header)


def _header(path: Path) -> bytes:
    """Return what a file of weights says of its tensors, as JSON; empty if it cannot be one."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return file.read(size) if size <= MAX_HEADER_BYTES else b""


def _numbers(header: bytes) -> Counter[str]:
    """Return how many numbers of each type a file holds.

    A broken header counts as nothing: a server needs no weights, and workers refuse such files.
    """
    found: Counter[str] = Counter()
    try:
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                found[str(tensor["dtype"])] += math.prod(map(int, tensor["shape"]))
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return Counter()
    return found
