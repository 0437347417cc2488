"""llama.cpp in its own process, through llama-cpp-python: `python -m loadtest.bench.peer_llama`.

Runs in an environment where llama_cpp and gguf are installed, and uses nothing of Triolet. Its
model is a GGUF file, or a directory, beside whose safetensors one is written (gguf_model.py).
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from .gguf_model import FILE_KINDS, write_gguf
from .peer_loop import answer_requests

MICRO_BATCH = 512
"""llama.cpp's own default: tokens that are computed at a time."""


class LlamaSession:
    """One model, and a context as large as each batch needs."""

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
        """See peer_loop.Session."""
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
        """See peer_loop.Session."""
        rows = [(token, self._position, sequence) for sequence, token in enumerate(self._last)]
        self._position += 1
        self._decode(rows)

    def end(self) -> None:
        """See peer_loop.Session."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def _open(self, sequences: int, num_tokens: int, batch: int) -> None:
        params = self._llama.llama_context_default_params()
        params.n_seq_max = sequences
        # Shared out evenly among the sequences, each share in multiples of 256.
        params.n_ctx = sequences * (-(-num_tokens // sequences // 256) * 256 + 256)
        params.n_batch = min(batch, MICRO_BATCH * 4)
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._llama.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp made no context"
        self._batch = self._llama.llama_batch_init(params.n_batch, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int]]) -> None:
        """Compute (token, position, sequence) rows; note the tokens after the last positions."""
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
    """Load and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--file", choices=FILE_KINDS, help="numbers in the file; as dtype")
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
