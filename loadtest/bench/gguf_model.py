"""A model directory's safetensors as the one file that llama.cpp reads.

Llama only, with one file of bf16 tensors, as model.py writes them. Needs numpy and the package
gguf, which lie in llama.cpp's environment; so both are imported when they are used.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_KINDS = ("bf16", "f32", "q8_0")
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OF_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(model: Path, path: Path, kind: str) -> None:
    """Write a model file; whole or not at all.

    Args:
      model: directory.
      path: of the file.
      kind: one of FILE_KINDS: what matrices are kept in. Vectors are always fp32.
    """
    gguf = import_module("gguf")
    config = json.loads((model / "config.json").read_text())
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _write_config(writer, config)
    for name, bits in tensors_of(model / "model.safetensors"):
        _write_tensor(gguf, writer, gguf_name(name), turn_heads(name, bits, config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a tensor."""
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_OF_LAYER[rest.removesuffix('.weight')]}.weight"


def tensors_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a safetensors file with the 16 bits of each bf16."""
    numpy = import_module("numpy")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = numpy.memmap(path, numpy.uint16, "r", 8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        begin, end = (offset // 2 for offset in entry["data_offsets"])
        yield name, data[begin:end].reshape(entry["shape"])


def turn_heads(name: str, bits: Any, config: dict[str, Any]) -> Any:  # noqa: ANN401 - arrays
    """Reorder query and key outputs: llama.cpp rotates neighbours, Hugging Face halves."""
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            outputs, inputs = bits.shape
            split = bits.reshape(config[heads], 2, outputs // config[heads] // 2, inputs)
            return split.swapaxes(1, 2).reshape(outputs, inputs)
    return bits


def _write_tensor(gguf: Any, writer: Any, name: str, bits: Any, kind: str) -> None:  # noqa: ANN401
    numpy = import_module("numpy")
    kinds = gguf.GGMLQuantizationType
    if bits.ndim > 1 and kind == "bf16":
        writer.add_tensor(name, numpy.ascontiguousarray(bits).view("uint8"), raw_dtype=kinds.BF16)
        return
    floats = (bits.astype("uint32") << 16).view("float32")
    if bits.ndim > 1 and kind == "q8_0":
        rounded = gguf.quants.quantize(floats, kinds.Q8_0)
        writer.add_tensor(name, rounded, raw_dtype=kinds.Q8_0)
        return
    writer.add_tensor(name, floats)


def _write_config(writer: Any, config: dict[str, Any]) -> None:  # noqa: ANN401
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    # Tokens go in and out as ids: llama.cpp needs no tokenizer, only their number.
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
