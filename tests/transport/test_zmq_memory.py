"""Tests that the process reuses the memory of received ZeroMQ messages for the next ones."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, resource
from transport.zmq_memory import keep_received_memory

assert keep_received_memory(64 << 20)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def receive(num_messages, num_bytes):
    messages = [libc.malloc(num_bytes) for _ in range(num_messages)]
    for message in messages:
        ctypes.memset(message, 1, num_bytes)
    for message in messages:
        libc.free(message)


receive(8, 4 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    receive(8, 4 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 4 * 8 * 1024
"""Page faults: 4 x 8 messages of 4 MiB."""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these thresholds")
def test_messages_of_a_window_touch_no_fresh_pages_twice() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert int(ended.stdout) < PAGES // 10
