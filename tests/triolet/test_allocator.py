"""Tests that a process returns large freed memory blocks to the operating system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from triolet.units import MIB

LEAVE_HOLES = """
import sys
from triolet.process import process_facts, return_free_memory, return_large_blocks

if sys.argv[1] == "returned":
    assert return_large_blocks(1 << 20)
del_me = bytearray(24 << 20)
del del_me  # glibc now takes blocks of this size from the heap
large, small = [], []
for _ in range(16):
    large.append(bytearray(8 << 20))
    small.append(bytearray(64 << 10))
full = process_facts(None).rss_bytes
large.clear()
if sys.argv[1] == "trimmed":
    return_free_memory()
print(full, process_facts(None).rss_bytes)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize(
    ("mode", "is_returned"), [("returned", True), ("trimmed", True), ("kept", False)]
)
def test_large_blocks_between_small_ones_are_given_back(mode: str, *, is_returned: bool) -> None:
    full, after = map(
        int,
        subprocess.check_output([sys.executable, "-c", LEAVE_HOLES, mode], timeout=60).split(),
    )
    assert (full - after > 100 * MIB) == is_returned
