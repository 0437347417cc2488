"""Read weights from a GGUF file under Hugging Face's tensor names, dequantised or as blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from store.gguf.config import ROPE_FACTORS
from store.gguf.container import read_gguf
from store.gguf.directory import WEIGHTS

from .layers import Blocks
from .model_config import load_model_config
from .preflight.gguf import COMPUTED, find_tensor, hugging_face_name, llama_cpp_name
from .weights import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from store.gguf.container import TensorPlace

    Bytes = NDArray[np.uint8]

ROWS_AT_ONCE: Final = 4096
"""Rows of a tensor that are dequantised at a time: 64 MiB of fp32 for an 8B model's embedding
instead of 2 GiB."""


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file by Hugging Face's names, read from disk on demand.

    Args:
      model_dir: the file's directory (store/gguf/directory.py).

    Attributes:
      files: the GGUF file.

    Raises:
      ModelError: the file is broken.
    """

    def __init__(self, model_dir: Path) -> None:
        self._file = read_gguf((model_dir / WEIGHTS).resolve())
        self.files = [self._file.path]
        self._heads: dict[str, int] = {}
        config = load_model_config(model_dir)
        if config.architecture == "LlamaForCausalLM":
            # llama.cpp rotates neighbouring pairs, Hugging Face halves. The converter reordered
            # rows.
            self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._data: Bytes = np.memmap(self._file.path, np.uint8, "r")

    def names(self) -> set[str]:
        """Return all tensors' names."""
        return {hugging_face_name(name) for name in self._file.tensors if name != ROPE_FACTORS}

    @property
    def dtype(self) -> str:
        """Encoding of most numbers, by llama.cpp's name: F32, BF16, Q4_1 …"""
        return self._file.encoding

    @property
    def is_quantised(self) -> bool:
        """See Checkpoint."""
        return any(place.encoding in COMPUTED for place in self._file.tensors.values())

    def blocks(self, name: str, shape: tuple[int, int]) -> Blocks | None:
        """See Checkpoint."""
        place = find_tensor(self._file, name, shape)
        if place.encoding not in COMPUTED:
            return None
        title = f"{self._file.path}: tensor {llama_cpp_name(name)}"
        return Blocks(title, place.encoding, shape[1], self._rows(name, place))

    def read(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """See Checkpoint."""
        place = find_tensor(self._file, name, shape)
        rows = self._rows(name, place)
        target = into.view(shape[0], -1)
        kind = GGMLQuantizationType(place.encoding)
        for first in range(0, shape[0], ROWS_AT_ONCE):
            packed = np.array(rows[first : first + ROWS_AT_ONCE])
            numbers = torch.from_numpy(dequantize(packed, kind))
            target[first : first + ROWS_AT_ONCE].copy_(numbers)

    def _rows(self, name: str, place: TensorPlace) -> Bytes:
        """Return a tensor's bytes [rows, bytes of a row], in Hugging Face's order."""
        num_rows = place.shape[0]
        rows = self._data[place.start : place.start + place.num_bytes].reshape(num_rows, -1)
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return rows
        # Whole rows are reordered and no block spans two rows, so they can stay packed.
        pairs = rows.reshape(heads, num_rows // heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(num_rows, -1)
