"""What a model directory says of vectors: pooling, normalisation, how far they may be cut.

Knows sentence-transformers' files (modules.json, the pooling module's config.json) and the
directory's own config.json; computes nothing. Where a model asks for what is not computed here, it
says so to whoever asks for a vector, and everything else of the model goes on being served.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.errors import ModelError
from triolet.pooling import Pooling

from .model_files import REMEDY, read_json, read_json_value

if TYPE_CHECKING:
    from .model_files import JsonObject

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
    """How inputs become vectors.

    Attributes:
      pooling: which hidden states count.
      is_normalized: vectors have length 1.
      size: numbers of a whole vector; 0 if the directory does not say.
      max_input_tokens: the longest input; None for the context.
      sizes: what `dimensions` may be, beside `size`; None for anything up to it.
      objection: why no vectors are made with this model; empty if they are.
    """

    pooling: Pooling = Pooling.LAST
    is_normalized: bool = True
    size: int = 0
    max_input_tokens: int | None = None
    sizes: frozenset[int] | None = frozenset()
    objection: str = ""


def read_embedding_model(model_dir: str | Path) -> EmbeddingModel:
    """Read a model directory. Without sentence-transformers' files: the last token, length 1.

    Raises:
      ModelError: a file is broken.
    """
    folder = Path(model_dir)
    config = read_json(folder / "config.json")
    size = config.get("hidden_size")
    plain = EmbeddingModel(
        size=size if isinstance(size, int) else 0,
        sizes=_sizes(config),
        max_input_tokens=_max_input_tokens(folder),
    )
    path = folder / "modules.json"
    if not path.exists():
        return plain
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelError(f"{path} is no list of modules; {REMEDY}")
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
                objection = f"its module {kind[:64]!r} is not computed here"
    return EmbeddingModel(
        pooling, is_normalized, plain.size, plain.max_input_tokens, plain.sizes, objection
    )


def _pooling(folder: Path, module: JsonObject) -> Pooling | str:
    """Return how a pooling module pools, or why that cannot be done."""
    name = module.get("path")
    if not isinstance(name, str) or not _MODULE_PATH.fullmatch(name) or name in (".", ".."):
        raise ModelError(f"{folder / 'modules.json'} names no folder for its pooling; {REMEDY}")
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
        return f"its pooling, {', '.join(wanted)[:128] or 'none'}, is not computed here"
    return known[wanted[0]]


def _sizes(config: JsonObject) -> frozenset[int] | None:
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list):
        return frozenset(size for size in sizes if type(size) is int and size > 0)
    return None if config.get("is_matryoshka") is True else frozenset()


def _max_input_tokens(folder: Path) -> int | None:
    config = read_json(folder / "sentence_bert_config.json", is_optional=True)
    most = config.get("max_seq_length")
    return most if isinstance(most, int) and most > 0 else None
