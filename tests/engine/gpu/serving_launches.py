"""`python -m tests.engine.gpu.serving_launches`: list kernels that would compile while serving.

The engine warms up, then computes steps of every kind and size on a fake GPU (dry_gpu.py). Prints
each kernel that Triton would compile after the warm-up: on a GPU each is a pause of seconds. Runs
in a separate process, because the tests' process interprets kernels.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import torch

from engine.attention.triton import TritonAttention
from engine.batch import SampleSpec, StepRow
from engine.block_ledger import BlockLedger
from engine.gpu.buckets import bucket_sizes
from engine.gpu.decoder import Decoder
from engine.gpu.model import FusedModel
from engine.gpu.transformer import FusedTransformer
from engine.kv_pool import KVLayout, KVPool
from engine.layers import DecoderLayer, Linear, RMSNorm, Weights
from engine.load import warm_up
from engine.model_config import Biases, ModelConfig
from engine.rope_config import RopeConfig
from engine.runner import Runner
from triolet.config import EngineConfig
from triolet.sampling import SamplingParams

from .dry_gpu import DryGpu

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU: Final = torch.device("cpu")
SIZE: Final = 32
HEAD_DIM: Final = 16
VOCAB_SIZE: Final = 64
BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 600
MAX_MODEL_LEN: Final = 400
CONFIG: Final = EngineConfig(
    backend="triton", block_size=BLOCK_SIZE, max_num_seqs=20, max_num_batched_tokens=64
)
MODEL: Final = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=SIZE,
    intermediate_size=SIZE,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    is_tied=True,
    biases=Biases(),
    has_qk_norm=True,
    max_position_embeddings=MAX_MODEL_LEN,
    sliding_window=None,
)
PLAIN: Final = SamplingParams(temperature=0.0)
RANDOM: Final = SamplingParams(temperature=0.7, seed=3)


def runner() -> Runner:
    """Return a runner of a small model."""
    norm, head_norm = RMSNorm(torch.ones(SIZE), 1e-6), RMSNorm(torch.ones(HEAD_DIM), 1e-6)
    attended = MODEL.num_heads * HEAD_DIM
    layer = DecoderLayer(
        norm,
        Linear(torch.zeros(attended + 2 * MODEL.num_kv_heads * HEAD_DIM, SIZE)),
        head_norm,
        head_norm,
        Linear(torch.zeros(SIZE, attended)),
        norm,
        Linear(torch.zeros(2 * SIZE, SIZE)),
        Linear(torch.zeros(SIZE, SIZE)),
    )
    embedding = torch.zeros(VOCAB_SIZE, SIZE)
    weights = Weights(embedding, (layer, layer), norm, Linear(embedding))
    layout = KVLayout(2, BLOCK_SIZE, MODEL.num_kv_heads, HEAD_DIM, torch.float32)
    pool = KVPool(layout, NUM_BLOCKS, CPU)
    attention = TritonAttention(pool, MODEL.num_heads, MAX_MODEL_LEN)
    transformer = FusedTransformer(MODEL, weights, pool, attention, MAX_MODEL_LEN)
    sizes = bucket_sizes(CONFIG.max_num_seqs, fixed=False)
    decoder = Decoder(transformer, pool, sizes, MAX_MODEL_LEN, mask_wait_s=0.01)
    return Runner(FusedModel(transformer, BLOCK_SIZE, CPU), BLOCK_SIZE, pool, decoder)


def steps() -> Iterator[list[StepRow]]:
    """Yield steps of decode rows, of chunks and of both, with short and long block tables."""
    tables = [[1 + n] + [100 + i for i in range(99)] for n in range(CONFIG.max_num_seqs)]

    def decoding(count: int, length: int, params: SamplingParams = PLAIN) -> list[StepRow]:
        table = -(-(length + 1) // BLOCK_SIZE)
        return [
            StepRow([0], length, rows[:table], SampleSpec(params, 1), is_decode=True)
            for rows in tables[:count]
        ]

    def chunk(count: int, start: int) -> StepRow:
        table = tables[-1][: -(-(start + count) // BLOCK_SIZE)]
        return StepRow([0] * count, start, table, SampleSpec(PLAIN, 0))

    # Tables of 1 block, of 16 and 64 (multiples of 16), and of 6.
    for length in (1, 20, 63, 255):
        for count in (1, 2, 16, 20):
            yield decoding(count, length)
            yield [*decoding(min(count, 19), length), chunk(9, 0)]
        yield decoding(2, length, RANDOM)
        yield [chunk(1, length)]
    for count in (1, 16, 33):
        yield [chunk(count, 0)]
        yield [chunk(count, 100), chunk(1, 0)]


def main() -> int:
    """Print what the warm-up compiles, and what serving compiles after it."""
    ledger = BlockLedger(NUM_BLOCKS)
    computing = runner()
    with DryGpu() as warmed:
        warm_up(computing, ledger, CONFIG, MAX_MODEL_LEN, lambda share: None)
    with DryGpu() as serving:
        for rows in steps():
            computing.step(rows)
    sys.stdout.write(f"{len(warmed.launches)} in the warm-up\n")
    for launch in serving.launches:
        sys.stdout.write(f"late: {launch.name}\n")
    return 1 if serving.launches else 0


if __name__ == "__main__":
    sys.exit(main())
