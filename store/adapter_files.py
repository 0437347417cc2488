"""Read and check LoRA adapters in PEFT's format, and compute their digest. Needs no torch.

An adapter adds scale * B(A(x)) to some linear layers of a base model. Its digest covers its numbers
and the base that it was made for, so that KV is reused only for the same pair.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from safetensors import SafetensorError, deserialize

from triolet.adapter_keys import SHA256
from triolet.errors import ModelError
from triolet.memory import available_memory_bytes

from .model_dir.bounded import DOCUMENT, MAX_TENSORS, parse_json, read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REMEDY: Final = "give a directory written by PEFT's save_pretrained"
CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MODULES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
"""The linear layers that an adapter may change, and the part of a layer that holds them."""
FLOATS: Final = frozenset({"F32", "F16", "BF16"})
MAX_CONFIG_BYTES: Final = 1 << 20
"""Size of adapter_config.json: PEFT writes about 1 KiB, and lists of modules about 100 KiB."""
MAX_WEIGHTS_BYTES: Final = 4 << 30
"""Rank 64 for every matrix of a model of 70 billion parameters, in float32, takes 3 GiB."""
READING_SHARE: Final = 2
"""Memory needed for reading, as a multiple of the file size: its bytes, and the matrices."""
MAX_ALPHA: Final = 1e6
"""Most adapters are trained with 8 to 256. 10^39 exceeds float32."""
_TENSOR: Final = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,5})\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_PLAIN_INITS: Final = frozenset({"gaussian", "eva", "orthogonal"})
"""Ways to start a training that leave the base unchanged. Others (PiSSA, OLoRA, CorDA, LoftQ,
LoRA-GA) train on a changed base, and their weights fit only that."""
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA, which scales whole rows of the base",
    "modules_to_save": "whole modules beside the adapter",
    "rank_pattern": "different ranks for some layers",
    "alpha_pattern": "different scales for some layers",
    "lora_bias": "biases of B",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "layers that the base does not have",
    "trainable_token_indices": "embeddings of tokens",
    "target_parameters": "parameters that are not linear layers",
    "use_qalora": "QALoRA, which pools inputs",
    "use_bdlora": "block-diagonal matrices",
    "alora_invocation_tokens": "activated LoRA, which applies only after these tokens",
    "arrow_config": "a choice among adapters for each token",
    "megatron_config": "layers of Megatron",
}
"""Fields that change what an adapter computes, with their meaning for errors."""


class MatrixPlace(NamedTuple):
    """The place of an adapter's matrix.

    Attributes:
      layer: layer of the base model.
      module: one of MODULES.
      matrix: `A`, from inputs to rank, or `B`, from rank to outputs.
    """

    layer: int
    module: str
    matrix: str


class Matrix(NamedTuple):
    """One matrix of the file.

    Attributes:
      name: name of the tensor.
      dtype: as safetensors calls it.
      shape: [rank, inputs] of A, [outputs, rank] of B.
      numbers: its bytes, as covered by the digest: the file may be replaced later.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    numbers: bytearray


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that was read and checked.

    Attributes:
      path: path of its directory.
      rank: rank of all its matrices.
      scale: factor on B(A(x)).
      matrices: matrices by place; each module has both or neither.
      digest: sha256:… of the numbers and of the base.
    """

    path: Path
    rank: int
    scale: float
    matrices: Mapping[MatrixPlace, Matrix]
    digest: str

    @property
    def weights(self) -> Path:
        """The file of its matrices."""
        return self.path / WEIGHTS_FILE


def place_of(name: str) -> MatrixPlace | None:
    """Return the place of a tensor by its name; None if it is not a LoRA matrix."""
    matched = _TENSOR.fullmatch(name)
    if matched is None or MODULES.get(matched[3]) != matched[2]:
        return None
    return MatrixPlace(int(matched[1]), matched[3], matched[4])


def read_adapter(path: Path, base_digest: str, max_rank: int) -> AdapterFiles:
    """Read an adapter, check that it can be served, and compute its digest.

    Args:
      path: a directory written by PEFT's `save_pretrained`.
      base_digest: compute digest of the base's version; empty for a directory outside the store.
      max_rank: largest rank that is served.

    Raises:
      ModelError: a file is missing, broken or needs features that are not supported.
    """
    fields = _read_config(path / CONFIG_FILE)
    rank, scale = _rank_and_scale(path / CONFIG_FILE, fields, max_rank)
    weights = path / WEIGHTS_FILE
    matrices = _read_matrices(weights, rank)
    _require_whole(weights, matrices, fields)
    named: dict[str, Any] = {
        "base": base_digest,
        "rank": rank,
        "scale": scale,
        "matrices": [[one.name, one.dtype, list(one.shape)] for one in _in_order(matrices)],
    }
    digest = sha256(json.dumps(named, sort_keys=True, separators=(",", ":")).encode())
    for one in _in_order(matrices):
        digest.update(one.numbers)
    return AdapterFiles(path, rank, scale, matrices, SHA256 + digest.hexdigest())


def _require_memory(path: Path) -> None:
    """Refuse a file too large for the free memory: running out would kill the whole process."""
    num_bytes = path.stat().st_size if path.is_file() else 0
    needed, free = READING_SHARE * min(num_bytes, MAX_WEIGHTS_BYTES), available_memory_bytes()
    if free is not None and needed > free:
        raise ModelError(
            f"reading {path} takes {needed} bytes of memory, and {free} are free; stop programs "
            "that use "
            "memory here, or train an adapter of a smaller rank"
        )


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return the fields of an adapter's config, once they ask for plain LoRA only."""
    content = read_bytes(path, MAX_CONFIG_BYTES, REMEDY)
    fields = parse_json(path, content, DOCUMENT.num_values, REMEDY)
    if not isinstance(fields, dict):
        raise ModelError(f"{path} is not a JSON object; {REMEDY}")
    if fields.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type is {fields.get('peft_type')!r}; only 'LORA' is served; merge other "
            "adapters into the base (PEFT's merge_and_unload) and serve that"
        )
    for name, meaning in _REFUSED.items():
        if fields.get(name):
            raise ModelError(
                f"{path}: {name} asks for {meaning}, which is not served; train without it, or "
                "merge the adapter into the base (PEFT's merge_and_unload) and serve that"
            )
    if fields.get("bias", "none") != "none":
        raise ModelError(
            f"{path}: bias is {fields['bias']!r}; only 'none' is served; train without biases, or "
            "merge the adapter into the base (PEFT's merge_and_unload) and serve that"
        )
    begun = fields.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in _PLAIN_INITS:
        raise ModelError(
            f"{path}: init_lora_weights is {begun!r}, which trains on a changed base; convert "
            "the adapter to plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    return fields


def _rank_and_scale(path: Path, fields: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    rank, alpha, is_rs = fields.get("r"), fields.get("lora_alpha"), fields.get("use_rslora", False)
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{path}: r is {rank!r}; expected a whole number above 0")
    if rank > max_rank:
        raise ModelError(
            f"{path}: r is {rank}, and ranks up to {max_rank} are served; raise "
            "worker.engine.max_adapter_rank, or train a smaller adapter"
        )
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not abs(alpha) <= MAX_ALPHA  # NaN neither
    ):
        raise ModelError(
            f"{path}: lora_alpha is {repr(alpha)[:80]}; expected a number up to {MAX_ALPHA:g}"
        )
    if type(is_rs) is not bool:
        raise ModelError(f"{path}: use_rslora is {is_rs!r}; expected true or false")
    return rank, alpha / math.sqrt(rank) if is_rs else alpha / rank


def _read_matrices(path: Path, rank: int) -> dict[MatrixPlace, Matrix]:
    """Read the matrices of a file, in one pass."""
    _require_memory(path)
    try:
        content = read_bytes(path, MAX_WEIGHTS_BYTES, REMEDY)
        header_end = 8 + int.from_bytes(content[:8], "little")
        if content.count(b"{", 8, header_end) > MAX_TENSORS:
            raise ModelError(f"{path} has more than {MAX_TENSORS} tensors; {REMEDY}")
        tensors = dict(deserialize(content))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ModelError(
            f"{path} is not a valid safetensors file: {error}; save the adapter again"
        ) from error
    found: dict[MatrixPlace, Matrix] = {}
    for name, entry in sorted(tensors.items()):  # they come in no order
        place = place_of(name)
        if place is None:
            raise ModelError(
                f"{path}: tensor {name} is not LoRA for {', '.join(MODULES)}; train only these, "
                "or merge the adapter into the base (PEFT's merge_and_unload) and serve that"
            )
        one = Matrix(name, entry["dtype"], tuple(entry["shape"]), entry["data"])
        has_rank = len(one.shape) == 2 and one.shape[0 if place.matrix == "A" else 1] == rank
        if one.dtype not in FLOATS or not has_rank:
            wanted = f"[{rank}, inputs]" if place.matrix == "A" else f"[outputs, {rank}]"
            raise ModelError(
                f"{path}: tensor {name} is {one.dtype} {list(one.shape)}; {CONFIG_FILE} needs "
                f"floats {wanted}: check that the two files belong together"
            )
        if place in found:
            raise ModelError(
                f"{path}: tensors {found[place].name} and {name} have the same place; save the "
                "adapter again"
            )
        found[place] = one
    return found


def _require_whole(
    path: Path, matrices: Mapping[MatrixPlace, Matrix], fields: Mapping[str, Any]
) -> None:
    """Refuse a file without the counterpart of a matrix, or without a module that its config
    names."""
    if not matrices:
        raise ModelError(f"{path} holds no LoRA matrices; save the adapter again")
    for place, one in matrices.items():
        other = place._replace(matrix="B" if place.matrix == "A" else "A")
        if other not in matrices:
            raise ModelError(
                f"{path}: tensor {one.name} has no lora_{other.matrix}; save the adapter again"
            )
    targets = fields.get("target_modules")
    present = {place.module for place in matrices}
    for target in targets if isinstance(targets, list) else ():
        module = str(target).rpartition(".")[2]
        if module not in MODULES:
            raise ModelError(
                f"{path.parent / CONFIG_FILE}: target_modules names {target!r}; served are "
                f"{', '.join(MODULES)}; train only these, or merge the adapter into the base "
                "(PEFT's merge_and_unload) and serve that"
            )
        if module not in present:
            raise ModelError(
                f"{path} holds no {module}, which target_modules of {CONFIG_FILE} names; "
                "save the adapter again"
            )


def _in_order(matrices: Mapping[MatrixPlace, Matrix]) -> list[Matrix]:
    return [matrices[place] for place in sorted(matrices)]
