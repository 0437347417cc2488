"""Tests of copying KV blocks between GPU and host through pinned staging memory: bytes arrive
unchanged, and the memory is freed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.gpu.host_memory import HostMemory, error_drain
from engine.gpu.staging import Staging

from .late_stream import LateStream

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""


def pool(num_blocks: int = 8) -> torch.Tensor:
    torch.manual_seed(6)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(num_blocks, 2, 2, 4, 2, 8, device=place)


def test_bytes_pass_unchanged_and_memory_comes_back() -> None:
    source, target = pool(), pool() * 0
    out, into = Staging(source, 1), Staging(target, 3)
    for blocks in ([5, 1], [3], [2, 7, 4], [6]):
        expected = source[blocks].cpu().numpy().tobytes()
        memory = memoryview(bytearray(len(expected)))
        assert out.pin(memory)
        payload = np.frombuffer(memory, dtype=np.uint8).reshape(len(blocks), -1)
        out.export_blocks(blocks, payload)
        assert bytes(memory) == expected
        into.import_blocks(blocks, payload)
        payload[:] = 0  # the frame is freed after the import
        into.await_imports()
        assert torch.equal(target[blocks], source[blocks])
        if source.is_cuda:
            torch.cuda.synchronize()
    assert into.unpinned_copies == 0


def test_more_than_the_memory_holds_comes_in_all_the_same() -> None:
    source, target = pool(), pool() * 0
    into = Staging(target, 2)
    blocks = [4, 2, 6]
    into.import_blocks(blocks, source[blocks].cpu().view(3, -1).view(torch.uint8).numpy())
    into.await_imports()
    assert torch.equal(target[blocks], source[blocks])
    assert into.unpinned_copies == 1


def late_pool(num_units: int = 4) -> tuple[torch.Tensor, Staging]:
    """Return a pool and its staging. Copies run as late as on a GPU."""
    blocks = torch.zeros(8, 2, 2, 4, 2, 8)
    return blocks, Staging(blocks, num_units, LateStream)


def numbered(staging: Staging, count: int) -> np.ndarray:
    size = staging._pool.shape[1]
    return np.arange(count * size, dtype=np.int64).astype(np.uint8).reshape(count, size)


def exported(staging: Staging, blocks: list[int]) -> np.ndarray:
    target = np.empty((len(blocks), staging._pool.shape[1]), dtype=np.uint8)
    staging.export_blocks(blocks, target)
    return target


def test_a_block_leaves_with_the_bytes_that_are_still_on_their_way_in() -> None:
    _, staging = late_pool()
    payload = numbered(staging, 2)
    staging.import_blocks([3, 5], payload)
    assert np.array_equal(exported(staging, [3, 5]), payload)


def test_a_copied_block_has_the_bytes_that_are_still_on_their_way_in() -> None:
    _, staging = late_pool()
    payload = numbered(staging, 1)
    staging.import_blocks([3], payload)
    staging.copy_block(3, 6)
    staging.import_blocks([3], payload + 1)  # block 3 has its next owner
    assert np.array_equal(exported(staging, [6]), payload)
    assert np.array_equal(exported(staging, [3]), payload + 1)


def test_steps_wait_for_everything_that_was_written() -> None:
    blocks, staging = late_pool()
    staging.import_blocks([3], numbered(staging, 1) * 0 + 7)
    staging.copy_block(3, 4)
    assert int(blocks.count_nonzero()) == 0
    staging.await_imports()
    assert torch.equal(blocks[3], blocks[4])
    assert int((blocks[4].view(torch.uint8) == 7).all()) == 1


def test_a_block_that_changed_hands_ends_with_its_last_owners_bytes() -> None:
    _, staging = late_pool()
    first, last = numbered(staging, 1), numbered(staging, 1) + 9
    staging.import_blocks([2], first)
    staging.fill([2], float("nan"))  # freed, where freed blocks are poisoned
    staging.import_blocks([2], last)
    assert np.array_equal(exported(staging, [2]), last)


def test_host_memory_is_not_reused_before_its_copy_has_run() -> None:
    _, staging = late_pool(num_units=1)
    payloads = [numbered(staging, 1) + n for n in range(3)]
    for block, payload in enumerate(payloads):
        staging.import_blocks([block], payload)
    assert staging.unpinned_copies == 2
    assert np.array_equal(exported(staging, [0, 1, 2]), np.concatenate(payloads))
    staging.import_blocks([4], payloads[0])
    assert staging.unpinned_copies == 2


class FakeCudart:
    """A fake CUDA runtime that registers memory and latches the error of a failed call."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.latched = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        del flags
        end = address + num_bytes
        if any(address < a + n and a < end for a, n in self.registered.items()):
            self.latched = ALREADY_REGISTERED
            return ALREADY_REGISTERED
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713

    def take_error(self) -> int:
        error, self.latched = self.latched, 0
        return error


def test_memory_is_pinned_once_and_unpinned_before_it_is_freed() -> None:
    runtime = FakeCudart()
    host = HostMemory(runtime, runtime.take_error)
    memory = memoryview(bytearray(4096))
    assert host.pin(memory)
    assert host.pin(memory)
    assert (len(runtime.registered), runtime.latched) == (1, 0)
    host.unpin(memory)
    host.unpin(memory)
    assert (runtime.registered, runtime.latched) == ({}, 0)
    assert host.pin(memory)


def test_a_failed_pin_leaves_no_error_for_the_next_launch() -> None:
    runtime = FakeCudart()
    memory = memoryview(bytearray(4096))
    assert HostMemory(runtime, runtime.take_error).pin(memory)
    other = HostMemory(runtime, runtime.take_error)
    assert not other.pin(memory[1024:])
    assert runtime.latched == 0
    other.unpin(memory[1024:])
    assert len(runtime.registered) == 1


def test_the_error_is_taken_from_the_runtime_that_torch_has_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ctypes

    loaded = []

    class Library:
        def __init__(self, path: str) -> None:
            loaded.append(path)
            self.cudaGetLastError = lambda: ALREADY_REGISTERED

    monkeypatch.setattr(ctypes, "CDLL", Library)
    path = "/venv/nvidia/cu13/lib/libcudart.so.13"
    drain = error_drain(f"7f00-7f10 r-xp 0 0:1 5  /lib/libc.so.6\n7f20-7f30 r-xp 0 0:1 9  {path}\n")
    assert (drain(), loaded) == (ALREADY_REGISTERED, [path])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here")
def test_a_slow_copy_in_is_waited_for_on_the_gpu() -> None:
    """The stream of writes is busy for tens of milliseconds before the copy begins."""
    blocks = torch.zeros(3, 2**26, device="cuda", dtype=torch.uint8)
    staging = Staging(blocks, 1)
    payload = np.full((1, 2**26), 7, dtype=np.uint8)
    staging._in.queue(lambda: torch.cuda._sleep(10**8))
    staging.import_blocks([2], payload)
    staging.copy_block(2, 1)
    target = np.zeros((2, 2**26), dtype=np.uint8)
    staging.export_blocks([2, 1], target)
    assert bool((target == 7).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here")
def test_a_failed_pin_does_not_fail_the_next_launch_on_the_gpu() -> None:
    memory = memoryview(bytearray(2**20))
    first, second = Staging(pool(), 1), Staging(pool(), 1)
    assert first.pin(memory)
    assert not second.pin(memory)
    torch.ones(5, device="cuda").sum().item()
    first.unpin(memory)
    assert second.pin(memory)
    second.unpin(memory)
