"""Tests of running work in a child process with limits: it returns the result, or None if a limit
is exceeded."""

from __future__ import annotations

import os
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from server.text.isolated import limit_cpu, run_isolated
from triolet.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable


def isolated(
    work: Callable[[], bytes],
    *,
    cpu_s: float = 60.0,
    memory_bytes: int = 256 * MIB,
    max_bytes: int = MIB,
) -> bytes | None:
    return run_isolated(work, cpu_s=cpu_s, memory_bytes=memory_bytes, max_bytes=max_bytes)


def spin() -> bytes:
    """Run for some seconds, not forever: without a limit the tests must fail, not hang."""
    for _ in range(50_000_000):
        pass
    return b"late"


def fail() -> bytes:
    raise LookupError("nothing is there")


def test_what_work_returns_comes_back() -> None:
    assert isolated(lambda: b"done") == b"done"
    assert isolated(lambda: b"") == b""


def test_work_runs_in_another_process_without_core_dumps_and_without_words() -> None:
    pid = isolated(lambda: str(os.getpid()).encode())
    assert pid is not None
    assert int(pid) != os.getpid()
    limits = isolated(lambda: Path("/proc/self/limits").read_bytes())
    assert limits is not None
    (core,) = (line for line in limits.decode().splitlines() if "core" in line)
    assert core.split()[4:6] == ["0", "0"]
    assert isolated(lambda: os.readlink("/proc/self/fd/2").encode()) == b"/dev/null"


def test_work_that_takes_too_long_is_ended() -> None:
    assert isolated(spin, cpu_s=0.02) is None


def test_work_may_begin_its_time_anew() -> None:
    def long_then_short() -> bytes:
        limit_cpu(0.02)
        return spin()

    assert isolated(long_then_short) is None


def test_memory_beyond_the_bound_is_refused() -> None:
    def take() -> bytes:
        # Memory freed earlier might otherwise serve the allocation.
        with mmap(-1, 64 * MIB) as taken:
            return str(len(taken)).encode()

    assert isolated(take) == b"67108864"
    assert isolated(take, memory_bytes=32 * MIB) is None


@pytest.mark.parametrize("size", [1001, 4 * MIB])
def test_a_result_beyond_the_bound_is_refused(size: int) -> None:
    assert isolated(lambda: bytes(1000), max_bytes=1000) == bytes(1000)
    assert isolated(lambda: bytes(size), max_bytes=1000) is None


def test_work_that_raises_returns_nothing() -> None:
    assert isolated(fail) is None


@pytest.mark.parametrize("work", [lambda: b"done", fail, spin, lambda: bytes(64 * KIB)])
def test_no_child_and_no_descriptor_stays(work: Callable[[], bytes], tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    before = os.listdir("/proc/self/fd")

    def said() -> bytes:
        pid.write_text(str(os.getpid()))
        return work()

    isolated(said, cpu_s=0.02, max_bytes=1000)
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(int(pid.read_text()), os.WNOHANG)
