"""A changed file of tenants counts as a whole, once it has settled, or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
import trio

from server.tenants.tenancy import Tenancy, TenantFile
from triolet.config import TenantsConfig
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Set
    from pathlib import Path

SECRET: Final = 'cache_secret = "' + "0f" * 32 + '"\n'
ALICE: Final = SECRET + "[tenants.alice]\n"
BOB: Final = SECRET + "[tenants.bob]\n"
CONFIG: Final = TenantsConfig(poll_s=0.005)
PATIENCE_S: Final = 60.0


def written(path: Path, text: str, age_s: int = 0) -> TenantFile:
    """Write a file that was changed at a time of its own, and return it."""
    path.write_text(text)
    os.utime(path, (1_000_000 + age_s, 1_000_000 + age_s))
    return TenantFile(str(path), CONFIG)


def test_a_file_is_read_and_has_not_changed_since(tmp_path: Path) -> None:
    file = written(tmp_path / "tenants", ALICE)
    assert set(file.read().by_name) == {"alice"}
    assert not file.has_settled()
    assert not file.has_settled()


def test_a_change_counts_when_it_has_stood_for_one_more_look(tmp_path: Path) -> None:
    file = written(tmp_path / "tenants", ALICE)
    file.read()
    written(tmp_path / "tenants", SECRET, age_s=1)
    assert not file.has_settled()
    written(tmp_path / "tenants", BOB, age_s=2)
    assert not file.has_settled()
    assert file.has_settled()
    assert set(file.read().by_name) == {"bob"}
    assert not file.has_settled()


def test_another_file_in_its_place_is_noticed_whatever_its_age(tmp_path: Path) -> None:
    file = written(tmp_path / "tenants", ALICE)
    file.read()
    written(tmp_path / "new", ALICE.replace("alice", "carol"))
    (tmp_path / "new").replace(tmp_path / "tenants")
    assert [file.has_settled(), file.has_settled()] == [False, True]


def test_a_file_that_is_gone_has_changed_too(tmp_path: Path) -> None:
    file = written(tmp_path / "tenants", ALICE)
    file.read()
    (tmp_path / "tenants").unlink()
    assert [file.has_settled(), file.has_settled()] == [False, True]
    with pytest.raises(ConfigError, match="cannot be read"):
        file.read()


def test_a_file_beyond_its_bound_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "tenants", ALICE)
    file = TenantFile(str(tmp_path / "tenants"), replace(CONFIG, max_bytes=len(ALICE) - 1))
    with pytest.raises(ConfigError, match=f"longer than the {len(ALICE) - 1} bytes"):
        file.read()


async def until(is_so: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while True:
            if is_so():
                return
            await trio.sleep(CONFIG.poll_s)


async def test_a_running_server_takes_good_changes_and_keeps_what_it_has_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tenants"
    file = written(path, ALICE)
    tenancy = Tenancy(file.read())
    dismissed: list[Set[str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.run, tenancy, dismissed.append)
        written(path, "nonsense", age_s=1)
        await until(lambda: bool(tenancy.report.problem))
        assert "is no TOML" in tenancy.report.problem
        assert tenancy.tenant_named("alice").name == "alice"
        path.unlink()
        await until(lambda: tenancy.report.num_refused == 2)
        assert dismissed == []
        written(path, BOB, age_s=2)
        await until(lambda: "bob" in {one.name for one in tenancy.all_tenants})
        assert tenancy.report.problem == ""
        await until(lambda: dismissed == [{"alice"}])
        nursery.cancel_scope.cancel()
    assert tenancy.report.num_refused == 2
