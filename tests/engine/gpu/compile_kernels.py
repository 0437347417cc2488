"""`python -m tests.engine.gpu.compile_kernels`: compile every kernel for an H100, on any machine.

The engine launches its kernels on a fake GPU (dry_gpu.py), so types, divisibility, warps and stages
are those of real launches. The interpreter accepts code that the compiler refuses (for example a
variable that changes its shape in a loop), so tests need both. Runs in a separate process, because
the tests' process interprets kernels.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Final

import torch

from engine.attention.triton import TritonAttention
from engine.batch import StepRow, flatten
from engine.gpu.layer_kernels import add_norm, rotate_store, silu_mul
from engine.gpu.sampler_kernels import choose
from engine.kv_pool import KVLayout, KVPool
from engine.layers import RMSNorm

from .dry_gpu import DryGpu

SHARED_BYTES: Final = 227 * 1024
"""What one program may use on an H100."""
HEAD_DIMS: Final = (64, 128, 256)
DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NUM_KV_HEADS: Final = 8
GROUP: Final = 7
BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 8_192
VOCAB_SIZE: Final = 128_256
HIDDEN_SIZE: Final = 4_096
INTERMEDIATE_SIZE: Final = 14_336
COLUMNS: Final = ("kernel", "head_dim", "dtype", "warps", "stages", "shared", "cp.async")


def launch_all(head_dim: int, dtype: torch.dtype) -> None:
    """Launch all kernels of a layer and of the sampler, with and without optional parts."""
    layout = KVLayout(1, BLOCK_SIZE, NUM_KV_HEADS, head_dim, dtype)
    pool = KVPool(layout, 8, torch.device("cpu"))
    num_heads = GROUP * NUM_KV_HEADS
    attention = TritonAttention(pool, num_heads, MAX_MODEL_LEN)
    step = flatten(
        [StepRow([0], 20, [1, 2], is_decode=True), StepRow([0] * 30, 0, [3, 4])], BLOCK_SIZE
    )
    tokens = len(step.token_ids)
    attention.plan_rows(step)
    attention.attend_stored(0, torch.empty(tokens, num_heads, head_dim, dtype=dtype))
    norm = RMSNorm(torch.empty(HIDDEN_SIZE, dtype=dtype), 1e-6)
    hidden = torch.empty(2, tokens, HIDDEN_SIZE, dtype=dtype)
    for delta in (None, hidden[1]):
        add_norm(delta, hidden[0], norm)
    silu_mul(torch.empty(tokens, 2 * INTERMEDIATE_SIZE, dtype=dtype))
    of_head = RMSNorm(torch.empty(head_dim, dtype=dtype), 1e-6)
    angles = torch.empty(2, MAX_MODEL_LEN, head_dim // 2).unbind(0)
    places = torch.zeros(2, tokens, dtype=torch.int64)
    heads = torch.empty(tokens, num_heads + 2 * NUM_KV_HEADS, head_dim, dtype=dtype)
    for norms in (None, (of_head, of_head)):
        rotate_store(heads, (angles[0], angles[1]), *places, norms, pool.blocks[:, 0])
    numbers = torch.zeros(2, 4, dtype=torch.float64)
    seeds = torch.zeros(2, 4, dtype=torch.int64)
    choose(torch.empty(4, VOCAB_SIZE), *numbers, *seeds)


def main() -> int:
    """Compile all kernels, print a table, and report kernels that do not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    arguments = parser.parse_args()
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    too_large = []
    for head_dim, dtype in product(arguments.head_dims, arguments.dtypes):
        with DryGpu() as gpu:
            launch_all(head_dim, DTYPES[dtype])
        for launch in gpu.launches:
            kernel = launch.compiled()
            facts = kernel.metadata
            copies = kernel.asm["ptx"].count("cp.async.c")
            row = (launch.name, head_dim, dtype, facts.num_warps, facts.num_stages, facts.shared)
            sys.stdout.write("\t".join(map(str, (*row, copies))) + "\n")
            sys.stdout.flush()
            if facts.shared > SHARED_BYTES:
                too_large.append(launch.name)
    if too_large:
        sys.stderr.write(f"more than {SHARED_BYTES} bytes of shared memory: {too_large}\n")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
