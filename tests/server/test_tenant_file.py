"""Tests that a changed tenants file applies as a whole once it is stable, or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
import trio

from server.tenants.tenancy import Tenancy, TenantFile
from tests.server.support.surface import until
from triolet.config import AutoConfig, TenantsConfig
from triolet.errors import ConfigError
from triolet.tenants.ladders import require_tenant_ladders

if TYPE_CHECKING:
    from collections.abc import Set
    from pathlib import Path

    from triolet.tenants.plans import Tenants

SECRET: Final = 'cache_secret = "' + "0f" * 32 + '"\n'
ALICE: Final = SECRET + "[tenants.alice]\n"
BOB: Final = SECRET + "[tenants.bob]\n"
CONFIG: Final = TenantsConfig(poll_s=0.005)
PATIENCE_S: Final = 60.0


def written(path: Path, text: str, age_s: int = 0) -> TenantFile:
    """Write a file with a given modification time, and return it."""
    path.write_text(text)
    os.utime(path, (1_000_000 + age_s, 1_000_000 + age_s))
    return TenantFile(str(path), CONFIG)


def refuse_bob(tenants: Tenants, file: str) -> None:
    if "bob" in tenants.by_name:
        raise ConfigError(f"{file}: no bob")


async def test_what_this_server_cannot_serve_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    written(path, ALICE)
    file = TenantFile(str(path), CONFIG, refuse_bob)
    tenancy = Tenancy(file.read())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(file.run, tenancy, lambda gone: None)
        written(path, BOB, age_s=1)
        await until(lambda: bool(tenancy.report.problem))
        assert tenancy.report.problem == f"{path}: no bob"
        assert tenancy.tenant_named("alice").name == "alice"
        nursery.cancel_scope.cancel()


def test_a_ladder_of_a_model_that_is_left_out_is_refused_alone(tmp_path: Path) -> None:
    def check(tenants: Tenants, file: str) -> None:
        require_tenant_ladders(tenants, AutoConfig(("chat",)), ("chat",), file)

    path = tmp_path / "tenants"
    path.write_text(SECRET + "[tenants.alice]\nauto = ['code']\n[tenants.bob]\nauto = ['chat']\n")
    file = TenantFile(str(path), CONFIG, check)
    tenancy = file.open({"code"})
    assert tenancy.tenant_named("alice").auto is None
    assert tenancy.tenant_named("bob").auto == ("chat",)
    assert "[tenants.alice] auto names 'code'" in tenancy.report.problem
    with pytest.raises(ConfigError, match="auto names 'code'"):
        file.open(())


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
        assert "is not valid TOML" in tenancy.report.problem
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
