"""Tests of measuring available memory: that of the machine, and of each control group around the
process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from triolet.memory import available_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path


def limit(group: Path, most: str, used: int = 0, inactive: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_the_tightest_of_machine_and_control_groups_counts(tmp_path: Path) -> None:
    meminfo, own, root = tmp_path / "meminfo", tmp_path / "own", tmp_path / "groups"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:  4 kB\n")

    def found() -> int | None:
        return available_memory_bytes(meminfo, root, own)

    assert found() == 4096
    limit(root, "3000", used=1000, inactive=400)
    assert found() == 2400, "a container's own group"
    own.write_text("1:name=systemd:/x\n0::/system.slice/triolet.service\n")
    assert found() == 2400, "groups that are hidden"
    limit(root / "system.slice", "max")
    limit(root / "system.slice" / "triolet.service", "700", used=500)
    assert found() == 200, "MemoryMax of a unit"
    limit(root / "system.slice", "600", used=550)
    assert found() == 50, "a group above it"
    limit(root / "system.slice", "600", used=999)
    assert found() == 0
    meminfo.unlink()
    assert found() == 0


def limit_v1(group: Path, most: int, used: int = 0, inactive: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{most}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory", "memory,hugetlb"])
def test_groups_of_version_1_count_as_well(tmp_path: Path, controllers: str) -> None:
    meminfo, own, root = tmp_path / "meminfo", tmp_path / "own", tmp_path / "groups"
    meminfo.write_text("MemAvailable:  8 kB\n")
    own.write_text(f"12:cpu,cpuacct:/other\n9:{controllers}:/docker/ab\n0::/\n")

    def found() -> int | None:
        return available_memory_bytes(meminfo, root, own)

    limit_v1(root / "memory", 9_223_372_036_854_771_712, used=3000)
    assert found() == 8192, "no limit"
    limit_v1(root / "memory" / "docker" / "ab", 3000, used=1000, inactive=400)
    assert found() == 2400, "the process's own group"
    limit_v1(root / "memory" / "docker", 2000, used=1500)
    assert found() == 500, "a group above it"
    limit_v1(root / "memory", 300, used=100)
    assert found() == 200, "a container's own group, where its parents are hidden"
    limit(root, "150", used=100)
    assert found() == 50, "both versions are mounted"


def test_what_nothing_tells_is_unknown(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None
