"""Read weights from safetensors files: check them against the config, merge and convert them.

Expects the tensor names of Hugging Face's Llama family. Reads through mmap and never unpickles.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from store.model_dir.headers import StoredTensor, weight_files
from triolet.errors import ConfigError, ModelError

from .layers import Blocks, DecoderLayer, Linear, RMSNorm, Weights
from .preflight.check import most_common
from .preflight.tensors import FLOATS, mismatched, missing, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

    from .model_config import ModelConfig


class Checkpoint:
    """The tensors of a model directory by name, read from disk on demand.

    Args:
      model_dir: the directory.

    Raises:
      ModelError: files are missing or broken.
    """

    def __init__(self, model_dir: Path) -> None:
        self.files = weight_files(model_dir)
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path in self.files:
            try:
                opened = safe_open(path, framework="pt", device="cpu")
                names: list[str] = list(opened.keys())  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is not a valid safetensors file: {error}; fetch the file again"
                ) from error
            for name in names:
                if name in self._file_of:
                    raise ModelError(
                        f"{path}: tensor {name} is also in {self._path_of[name].name}; "
                        "fetch the files again"
                    )
                self._file_of[name] = opened
                self._path_of[name] = path

    def names(self) -> set[str]:
        """Return all tensors' names."""
        return set(self._file_of)

    @property
    def dtype(self) -> str:
        """Dtype of most tensors, by safetensors' name: F32, BF16, F16 …"""
        return most_common(f.get_slice(name).get_dtype() for name, f in self._file_of.items())

    @property
    def is_quantised(self) -> bool:
        """Whether `blocks` returns any matrix."""
        return False

    def blocks(self, name: str, shape: tuple[int, int]) -> Blocks | None:
        """Return a quantised matrix as stored, if kernels can compute with it; else None.

        Args:
          name: name of the tensor.
          shape: required shape.

        Raises:
          ModelError: the tensor is missing, or has another shape.
        """
        return None

    def read(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """Copy one tensor and convert it to the target's dtype.

        Args:
          name: name of the tensor.
          shape: required shape.
          into: target tensor of that shape.

        Raises:
          ModelError: the tensor is missing, or has another shape or an unsupported dtype.
        """
        opened = self._file_of.get(name)
        if opened is None:
            raise missing(name, self.files[0].parent)
        stored = opened.get_slice(name)
        found = StoredTensor(self._path_of[name], stored.get_dtype(), tuple(stored.get_shape()))
        if found.shape != shape or found.dtype not in FLOATS:
            raise mismatched(name, found, shape)
        try:
            into.copy_(opened.get_tensor(name))
        except SafetensorError as error:
            raise ModelError(
                f"{self._path_of[name]}: tensor {name}: {error}; fetch the file again"
            ) from error


def weights_digest(files: Iterable[Path]) -> str:
    """Return a 128-bit digest of weight files (xxh3, about 10 GB/s).

    It detects mix-ups, not forgery: both workers read their own files.
    """
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            digest.update(data)
    return digest.hexdigest()


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None],
) -> Weights:
    """Read all tensors of a model.

    Args:
      config: the model's shape.
      checkpoint: the checkpoint to read.
      dtype: dtype to convert to.
      device: device of the tensors.
      on_progress: called with the share of layers loaded.

    Raises:
      ModelError: a tensor is missing, unknown or of another shape.
    """
    reader = WeightReader(config, checkpoint, dtype, device)
    table = reader.table()
    layers = []
    for index in range(config.num_layers):
        layers.append(reader.layer(index))
        on_progress((index + 1) / config.num_layers)
    weights = Weights(table.weight, tuple(layers), reader.norm(), reader.lm_head(table))
    reader.finish()
    return weights


class WeightReader:
    """Reads the tensors of one checkpoint piece by piece and records which were used.

    Args:
      config: the model's shape.
      checkpoint: the checkpoint to read.
      dtype: dtype to convert to.
      device: device of the tensors.
      keeps_blocks: keep quantised matrices as stored, where kernels can compute with them.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_blocks: bool = False,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._keeps_blocks = keeps_blocks
        self._used: set[str] = set()

    def table(self) -> Linear:
        """Read the embedding [vocab_size, hidden_size]."""
        config = self._config
        return self._linear(
            "model.embed_tokens", {"": config.vocab_size}, config.hidden_size, False
        )

    def norm(self) -> RMSNorm:
        """Read the final norm."""
        return self._norm("model.norm", self._config.hidden_size)

    def lm_head(self, table: Linear) -> Linear:
        """Read the output layer; in a tied model, return the embedding."""
        config = self._config
        if config.is_tied:
            return table
        return self._linear("lm_head", {"": config.vocab_size}, config.hidden_size, False)

    def finish(self) -> None:
        """Refuse a checkpoint with unused tensors.

        Raises:
          ModelError: the model does not have one of the tensors.
        """
        refuse_unknown(self._config, self._checkpoint.names() - self._used)

    def layer(self, index: int) -> DecoderLayer:
        """Read one layer."""
        config, prefix = self._config, f"model.layers.{index}"
        hidden, biases = config.hidden_size, config.biases
        keys = config.num_kv_heads * config.head_dim
        queries = config.num_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn.", f"{prefix}.mlp."
        query_norm = key_norm = None
        if config.has_qk_norm:
            query_norm = self._norm(f"{attention}q_norm", config.head_dim)
            key_norm = self._norm(f"{attention}k_norm", config.head_dim)
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm", hidden),
            qkv=self._linear(
                attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, biases.qkv
            ),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._linear(attention, {"o_proj": hidden}, queries, biases.output),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm", hidden),
            gate_up=self._linear(mlp, gate_up, hidden, biases.mlp),
            down=self._linear(mlp, {"down_proj": hidden}, config.intermediate_size, biases.mlp),
        )

    def _linear(self, prefix: str, parts: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """Stack layers that share their input; `parts` maps names to numbers of outputs."""
        blocks = self._blocks({f"{prefix}{part}.weight": parts[part] for part in parts}, inputs)
        weight = self._empty(0 if blocks else sum(parts.values()), inputs)
        bias = self._empty(sum(parts.values())) if has_bias else None
        first = 0
        for part, outputs in parts.items():
            if not blocks:
                self._read(f"{prefix}{part}.weight", weight[first : first + outputs])
            if bias is not None:
                self._read(f"{prefix}{part}.bias", bias[first : first + outputs])
            first += outputs
        return Linear(weight, bias, blocks)

    def _blocks(self, parts: dict[str, int], inputs: int) -> tuple[Blocks, ...]:
        """Return a weight's parts as stored; empty if any of them must be converted."""
        if not self._keeps_blocks:
            return ()
        found = [self._checkpoint.blocks(name, (parts[name], inputs)) for name in parts]
        if None in found:
            return ()
        self._used |= parts.keys()
        return tuple(one for one in found if one is not None)

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._tensor(f"{name}.weight", size), self._config.rms_norm_eps)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self._read(name, tensor)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        try:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise ConfigError(
                f"device is {str(self._device)!r}, and its memory does not hold the model's "
                "weights; use a smaller model, or dtype 'bfloat16'"
            ) from error

    def _read(self, name: str, into: Tensor) -> None:
        self._used.add(name)
        self._checkpoint.read(name, cast("tuple[int, ...]", tuple(into.shape)), into)
