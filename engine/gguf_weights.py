"""Weights from a GGUF file: read by the names of Hugging Face's Llama family, dequantised."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from triolet.errors import ModelError
from triolet.gguf.config import EMBEDDING, OUTPUT, ROPE_FACTORS
from triolet.gguf.container import ENCODINGS, read_gguf
from triolet.gguf.directory import WEIGHTS

from .model_config import load_model_config
from .weights import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    Bytes = NDArray[np.uint8]

ROWS_AT_ONCE: Final = 4096
"""Rows of a tensor that are dequantised together: of an 8B model's embedding 64 MiB of fp32, not
2 GiB."""
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OF_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PART_OF: Final = {value: key for key, value in _OF_LAYER.items()}
_OF_MODEL: Final = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": OUTPUT,
}
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NAME_OF: Final = {value: key for key, value in _OF_MODEL.items()}


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file by Hugging Face's names, still on disk.

    Args:
      model_dir: the file's directory (triolet/gguf/directory.py).

    Attributes:
      files: the one file.

    Raises:
      ModelError: the file is broken.
    """

    def __init__(self, model_dir: Path) -> None:
        self._file = read_gguf((model_dir / WEIGHTS).resolve())
        self.files = [self._file.path]
        self._heads: dict[str, int] = {}
        config = load_model_config(model_dir)
        if config.architecture == "LlamaForCausalLM":
            # llama.cpp rotates neighbours, Hugging Face halves: its converter reorders these rows.
            self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._data: Bytes = np.memmap(self._file.path, np.uint8, "r")

    def names(self) -> set[str]:
        """Return all tensors' names."""
        return {_our_name(name) for name in self._file.tensors if name != ROPE_FACTORS}

    @property
    def dtype(self) -> str:
        """What most of its numbers are stored in, as llama.cpp calls it: F32, BF16, Q4_1 …"""
        numbers: Counter[int] = Counter()
        for place in self._file.tensors.values():
            numbers[place.encoding] += prod(place.shape)
        return ENCODINGS[numbers.most_common(1)[0][0]].name

    @property
    def is_quantised(self) -> bool:
        """Whether most of its numbers are rounded to fewer bits than a float has."""
        return self.dtype not in ("F32", "F16", "BF16")

    def read(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """Copy one tensor, converted to the dtype of where it goes.

        Args:
          name: of the tensor.
          shape: what it must have.
          into: a tensor of that shape.

        Raises:
          ModelError: it is missing, or has another shape.
        """
        own_name = _own_name(name)
        place = self._file.tensors.get(own_name)
        if place is None or place.shape != shape:
            found = "missing" if place is None else f"of shape {list(place.shape)}"
            raise ModelError(
                f"{self._file.path}: tensor {own_name} is {found}; the metadata wants "
                f"{list(shape)}; fetch the file again"
            )
        rows = self._data[place.start : place.start + place.num_bytes].reshape(shape[0], -1)
        heads = self._heads.get(own_name.split(".")[-2])
        if heads is not None:
            # Whole rows change places, and no block crosses two of them: they may stay packed.
            pairs = rows.reshape(heads, shape[0] // heads // 2, 2, -1)
            rows = pairs.swapaxes(1, 2).reshape(shape[0], -1)
        target = into.view(shape[0], -1)
        kind = GGMLQuantizationType(place.encoding)
        for first in range(0, shape[0], ROWS_AT_ONCE):
            packed = np.array(rows[first : first + ROWS_AT_ONCE])
            numbers = torch.from_numpy(dequantize(packed, kind))
            target[first : first + ROWS_AT_ONCE].copy_(numbers)


def _own_name(name: str) -> str:
    """Return what llama.cpp calls a tensor."""
    if (match := _LAYER.fullmatch(name)) is None:
        return _OF_MODEL.get(name, name)
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_OF_LAYER[part]}.{kind}"


def _our_name(name: str) -> str:
    """Return what Hugging Face calls a tensor; its own name where that has none."""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _PART_OF:
        return _NAME_OF.get(name, name)
    return f"model.layers.{match[1]}.{_PART_OF[match[2]]}.{match[3]}"
