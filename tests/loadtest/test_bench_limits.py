"""Tests of measuring the machine's memory and compute limits, and of skipping engines that do not
suit its CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from loadtest.bench import limits
from loadtest.bench.engine import PEERS, dtype_here
from loadtest.bench.limits import Limits, measure_limits, torch_is_fast_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.native.library import Library


class FakeLibrary:
    """A fake kernel library with fixed speeds."""

    build = "avx2"

    def product_speed(self, is_bf16: bool, rounds: int, num_threads: int) -> float:
        return 200e9 if is_bf16 else 300e9


KERNELS: Any = FakeLibrary()
NARROW, WIDE = (lambda dtype: dtype == "float32"), (lambda dtype: True)


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Record the dtypes of torch's products. Fake speeds: 100 GFLOP/s in float32, 900 in bf16."""
    asked: list[torch.dtype] = []

    def speed(dtype: torch.dtype) -> float:
        asked.append(dtype)
        return 100e9 if dtype is torch.float32 else 900e9

    monkeypatch.setattr(limits, "_torch_speed", speed)
    monkeypatch.setattr(limits, "_read_speed", lambda library, threads: 40e9)
    return asked


@pytest.mark.parametrize(
    ("dtype", "library", "is_fast", "expected", "gflop_per_s", "source"),
    [
        ("bfloat16", KERNELS, NARROW, [], 200, "bfloat16 products (our avx2 kernels)"),
        ("bfloat16", None, NARROW, [torch.float32], 100, "float32 products (torch)"),
        ("bfloat16", KERNELS, WIDE, [torch.bfloat16], 900, "bfloat16 products (torch)"),
        ("float32", KERNELS, NARROW, [torch.float32], 300, "float32 products (our avx2 kernels)"),
    ],
)
def test_no_limit_is_taken_from_a_product_that_torch_computes_by_a_plain_loop(
    multiplied: list[torch.dtype],
    dtype: str,
    library: Library | None,
    is_fast: Callable[[str], bool],
    expected: list[torch.dtype],
    gflop_per_s: float,
    source: str,
) -> None:
    found = measure_limits(1, dtype, library, is_fast)
    assert multiplied == expected
    assert found == Limits(40.0, gflop_per_s, source)


def test_torch_is_slow_in_bf16_where_the_cpu_has_no_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not torch_is_fast_in("bfloat16")
    assert torch_is_fast_in("float32")


def test_a_peer_that_cannot_run_at_speed_is_left_out_and_says_why() -> None:
    slow = {peer.name: peer.why_slow("bfloat16", NARROW) for peer in PEERS}
    left_out = {name for name, reason in slow.items() if reason}
    assert left_out == {"triolet sdpa", "vllm", "transformers"}
    assert "without AVX-512" in str(slow["transformers"])
    assert not any(peer.why_slow("float32", NARROW) for peer in PEERS)
    assert not any(peer.why_slow("bfloat16", WIDE) for peer in PEERS)


def test_without_kernels_and_avx512_the_engine_is_measured_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dtype_here(WIDE) == "bfloat16"
    monkeypatch.setattr(limits, "load_library", lambda: None)
    assert (dtype_here(WIDE), dtype_here(NARROW)) == ("bfloat16", "float32")


def test_a_table_of_shares_says_in_its_header_what_they_are_shares_of() -> None:
    assert str(Limits(41.0, 912.4, "bfloat16 products (torch)")) == (
        "41.0 GB/s of memory reads, 912 GFLOP/s of bfloat16 products (torch)"
    )
