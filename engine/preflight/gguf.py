"""Check a GGUF file's tensors against its config, and map them to Hugging Face's names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from store.gguf.config import EMBEDDING, OUTPUT, ROPE_FACTORS
from store.gguf.container import ENCODINGS, REMEDY
from triolet.errors import ModelError

from .tensors import LM_HEAD, tensor_shapes

if TYPE_CHECKING:
    from store.gguf.container import GgufFile, TensorPlace

    from ..model_config import ModelConfig

COMPUTED: Final = frozenset({2, 3, 6, 7, 8, 12, 13, 14})
"""Q4_0 to Q8_0 and Q4_K to Q6_K: the native kernels compute with these without dequantising."""
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
    LM_HEAD: OUTPUT,
}
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NAME_OF: Final = {value: key for key, value in _OF_MODEL.items()}


def check_gguf_tensors(config: ModelConfig, file: GgufFile) -> None:
    """Check that a file has exactly the tensors of its config.

    Raises:
      ModelError: a tensor is missing, unknown or of another shape.
    """
    wanted = tensor_shapes(config)
    for name, shape in wanted.items():
        find_tensor(file, name, shape)
    ignored = {ROPE_FACTORS, *([OUTPUT] if config.is_tied else [])}
    unknown = sorted(file.tensors.keys() - {llama_cpp_name(name) for name in wanted} - ignored)
    if unknown:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]} has no place in a {config.architecture} as the "
            f"metadata describes it ({len(unknown)} such tensors); {REMEDY}"
        )


def find_tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> TensorPlace:
    """Return a tensor's place in the file.

    Args:
      file: the GGUF file.
      name: Hugging Face's name of the tensor.
      shape: required shape.

    Raises:
      ModelError: the tensor is missing, or has another shape.
    """
    own_name = llama_cpp_name(name)
    place = file.tensors.get(own_name)
    if place is None:
        raise ModelError(
            f"{file.path}: tensor {own_name} is missing; the metadata needs {list(shape)}; {REMEDY}"
        )
    if place.shape != shape:
        raise ModelError(
            f"{file.path}: tensor {own_name} is {ENCODINGS[place.encoding].name} "
            f"{list(place.shape)}; the metadata requires {list(shape)}; {REMEDY}"
        )
    return place


def llama_cpp_name(name: str) -> str:
    """Return llama.cpp's name of a tensor, given Hugging Face's."""
    if (match := _LAYER.fullmatch(name)) is None:
        return _OF_MODEL.get(name, name)
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_OF_LAYER[part]}.{kind}"


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a tensor, given llama.cpp's; unchanged if there is none."""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _PART_OF:
        return _NAME_OF.get(name, name)
    return f"model.layers.{match[1]}.{_PART_OF[match[2]]}.{match[3]}"
