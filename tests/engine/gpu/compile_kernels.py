"""`python -m tests.engine.gpu.compile_kernels`: compile every kernel for an H100, on any machine.

The interpreter runs what the compiler refuses (a variable that changes its shape in a loop, say),
so both are needed. In a process of its own, because there nothing is interpreted.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.gpu import attention_kernels, layer_kernels, sampler_kernels

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""What one program may use on an H100."""
HEADS: dict[str, Any] = {
    "num_kv_heads": 8,
    "group": 7,
    "head_dim": 128,
    "padded_dim": 128,
    "block_size": 16,
    "tile": 64,
    "precision": "ieee",
    "operand": tl.bfloat16,
}
SPLITS = {"split_tokens": 256, "max_splits": 32}
SAMPLER = {"tile": 4096, "padded_tiles": 32}
INTEGERS = ("tables", "seq_lens", "tokens", "tiles", "best")
LONGS = ("positions", "slots", "seeds", "chosen")
DOUBLES = ("numbers", "temperatures", "min_ps", "masses")
FLOATS = ("partial", "weights", "cosines", "sines", "logits", "maxima")
SCALARS = {"scale": "fp32", "eps": "fp32"}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (attention_kernels.decode_splits_kernel, {**HEADS, **SPLITS, "padded_group": 16}),
    (
        attention_kernels.combine_splits_kernel,
        {**SPLITS, "num_heads": 56, "head_dim": 128, "padded_dim": 128},
    ),
    (attention_kernels.prefill_kernel, {**HEADS, "padded_group": 8, "tile_tokens": 8}),
    (layer_kernels.add_norm_kernel, {"size": 4096, "block": 4096, "adds": True}),
    (layer_kernels.silu_mul_kernel, {"size": 14_336, "block": 1024}),
    (
        layer_kernels.rotate_store_kernel,
        {
            "num_heads": 32,
            "num_kv_heads": 8,
            "half": 64,
            "padded_half": 64,
            "block_size": 16,
            "norms": True,
        },
    ),
    (sampler_kernels.uniform_kernel, {"block": 64}),
    (sampler_kernels.best_kernel, {"tile": 4096}),
    (sampler_kernels.mass_kernel, SAMPLER),
    (sampler_kernels.pick_kernel, SAMPLER),
]
POINTERS = {
    **dict.fromkeys(INTEGERS, "*i32"),
    **dict.fromkeys(LONGS, "*i64"),
    **dict.fromkeys(DOUBLES, "*fp64"),
    **dict.fromkeys(FLOATS, "*fp32"),
}
PLAIN = ("_stride", "_size", "num_tiles", "count")


def type_of(name: str) -> str:
    """Return the type of an argument of that name: bf16 tensors are what is left."""
    if name in SCALARS or name.endswith(PLAIN):
        return SCALARS.get(name, "i32")
    return POINTERS.get(name, "*bf16")


def main() -> None:
    """Compile all, and say how much shared memory each takes."""
    for kernel, constants in KERNELS:
        signature = {
            name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names
        }
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, signature, values), target=HOPPER)
        assert compiled.metadata.shared <= SHARED_BYTES, kernel.__name__
        sys.stdout.write(f"{kernel.__name__} {compiled.metadata.shared}\n")


if __name__ == "__main__":
    main()
