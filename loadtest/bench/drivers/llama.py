"""`python -m loadtest.bench.drivers.llama`: llama.cpp in a process for the engine benchmark.

Runs in an environment with llama-cpp-python and gguf, without Triolet. Its model is a GGUF file, or
a directory with safetensors that is converted to a GGUF file.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .loop import answer_requests, driver_parser

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
    """Write a model file atomically.

    Args:
      model: directory of the model.
      path: path of the new file.
      kind: one of FILE_KINDS, the format of matrices. Vectors are always fp32.
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
    """Return llama.cpp's name of a tensor."""
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_OF_LAYER[rest.removesuffix('.weight')]}.weight"


def tensors_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a safetensors file, bf16 as raw 16-bit numbers."""
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


MICRO_BATCH = 512
"""Tokens computed at a time: llama.cpp's default."""


class LlamaSession:
    """One model, with a new context for each batch."""

    def __init__(self, llama: Any, path: Path, threads: int) -> None:  # noqa: ANN401
        self._llama = llama
        self._threads = threads
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        vocabulary = llama.llama_model_get_vocab(self._model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocabulary)
        self._context: Any = None
        self._batch: Any = None
        self._last: list[int] = []
        self._position = 0

    def begin(self, prompts: list[list[int]], most_steps: int) -> None:
        """See loop.Session."""
        tokens = len(prompts) * len(prompts[0])
        self._open(len(prompts), len(prompts) * (len(prompts[0]) + most_steps + 1), tokens)
        rows = [
            (token, position, sequence)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        self._position = len(prompts[0])
        self._last = [0] * len(prompts)
        for first in range(0, tokens, MICRO_BATCH * 4):
            self._decode(rows[first : first + MICRO_BATCH * 4])

    def step(self) -> None:
        """See loop.Session."""
        rows = [(token, self._position, sequence) for sequence, token in enumerate(self._last)]
        self._position += 1
        self._decode(rows)

    def end(self) -> None:
        """See loop.Session."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def _open(self, sequences: int, num_tokens: int, batch: int) -> None:
        params = self._llama.llama_context_default_params()
        params.n_seq_max = sequences
        # Divided evenly among the sequences, in multiples of 256 tokens.
        params.n_ctx = sequences * (-(-num_tokens // sequences // 256) * 256 + 256)
        params.n_batch = min(batch, MICRO_BATCH * 4)
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._llama.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp could not create a context"
        self._batch = self._llama.llama_batch_init(params.n_batch, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int]]) -> None:
        """Compute (token, position, sequence) rows; store the next tokens of the last positions."""
        batch = self._batch
        batch.n_tokens = len(rows)
        wanted = []
        for index, (token, position, sequence) in enumerate(rows):
            is_last = position >= self._position - 1
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = is_last
            if is_last:
                wanted.append((index, sequence))
        assert self._llama.llama_decode(self._context, batch) == 0, "llama.cpp could not decode"
        numpy = import_module("numpy")
        for index, sequence in wanted:
            logits = self._llama.llama_get_logits_ith(self._context, index)
            values = numpy.ctypeslib.as_array(logits, (self._vocab_size,))
            self._last[sequence] = int(values.argmax())


def main() -> None:
    """Load the model and answer requests."""
    parser = driver_parser(__doc__)
    parser.add_argument("--file", choices=FILE_KINDS, help="format of matrices in the file (dtype)")
    arguments = parser.parse_args()
    kind = arguments.file or {"bfloat16": "bf16", "float32": "f32"}[arguments.dtype]
    is_file = arguments.model.suffix == ".gguf"
    path = arguments.model if is_file else arguments.model / f"model-{kind}.gguf"
    if not path.exists():
        write_gguf(arguments.model, path, kind)

    def open_session() -> tuple[LlamaSession, str]:
        llama = import_module("llama_cpp")
        version = f"llama-cpp-python {llama.__version__}"
        return LlamaSession(llama, path, arguments.threads), version

    answer_requests(open_session)


if __name__ == "__main__":
    main()
