"""`triolet tenant`: manages the tenants and API keys in the file that servers read (`--tenants`).

A new key is printed once, alone on stdout, for scripts; all other text goes to stderr.
tenant_edit.py changes the file.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from triolet.errors import ConfigError
from triolet.tenants.api_keys import new_key
from triolet.tenants.form import DEFAULT_PLAN, DIGEST_PREFIX, read_tenants
from triolet.tenants.plans import Tenant, TenantRole
from triolet.units import parse_span

from ..audit.events import Action
from .options import AuditOption  # noqa: TC001 (typer reads annotations)
from .tenant_edit import Change, add_tenant, edited, rotate_keys, set_disabled

tenant_app = typer.Typer(help="Tenants of a server and their API keys.", no_args_is_help=True)

DEFAULT_FILE: Final = Path("tenants.toml")
DEFAULT_URL: Final = "http://127.0.0.1:8000"
SHOWN_DIGITS: Final = 12
"""Digits shown of a digest, enough to tell keys apart."""
MAX_GRACE_S: Final = 366 * 86_400
TAKEN: Final = "servers started with this file reload it within 2 s"

FileOption: TypeAlias = Annotated[
    Path, typer.Option("--tenants", metavar="FILE", help="Tenants file.")
]
NameArgument: TypeAlias = Annotated[str, typer.Argument(metavar="NAME")]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@tenant_app.command("add")
def add(
    name: NameArgument,
    file: FileOption = DEFAULT_FILE,
    plan: Annotated[
        str, typer.Option(help="Plan in the file that sets its limits.")
    ] = DEFAULT_PLAN,
    role: Annotated[
        TenantRole, typer.Option(help="Keys of an operator also give access to metrics and /fleet.")
    ] = TenantRole.USER,
    audit: AuditOption = None,
) -> None:
    """Add a tenant and print its key, once. Creates the file if it does not exist."""
    key = new_key()
    change = Change(Action.TENANT_ADD, name, audit)
    with edited(file, change, may_make=True) as document:
        add_tenant(document, name, key, plan, role)
    _say(f"{name} is added to {file}; {TAKEN}. Its key, which is not stored anywhere:")
    typer.echo(key)


@tenant_app.command("list")
def list_all(file: FileOption = DEFAULT_FILE, as_json: JsonOption = False) -> None:
    """Show all tenants."""
    shown = [_row(tenant) for tenant in _read(file)]
    if as_json:
        typer.echo(msgspec.json.encode(shown).decode())
        return
    table = Table("tenant", "plan", "role", "keys", "state", box=None, pad_edge=False)
    for one in shown:
        state = "disabled" if one["disabled"] else "enabled"
        table.add_row(one["name"], one["plan"], one["role"], str(len(one["keys"])), state)
    Console(highlight=False).print(table)


@tenant_app.command("show")
def show(name: NameArgument, file: FileOption = DEFAULT_FILE, as_json: JsonOption = False) -> None:
    """Show one tenant with its plan and the beginnings of its key digests."""
    tenant = next((one for one in _read(file) if one.name == name), None)
    if tenant is None:
        raise ConfigError(f"no tenant is called {name!r}; `triolet tenant list` shows all tenants")
    limits = asdict(tenant.plan)
    limits["classes"] = [one.name.lower() for one in tenant.plan.classes]
    shown = _row(tenant) | {"plan": limits}
    if as_json:
        typer.echo(msgspec.json.encode(shown).decode())
        return
    for field, value in (_row(tenant) | {"keys": None}).items():
        if field != "keys":
            typer.echo(f"{field:<22}{_word(value)}")
    for key in shown["keys"]:
        end = f", until {key['until']}" if key["until"] else ""
        typer.echo(f"{'key':<22}{key['digest']}...{end}")
    for field, value in limits.items():
        if field != "name":
            typer.echo(f"{field:<22}{_word(value)}")


@tenant_app.command("usage")
def usage(
    url: Annotated[str, typer.Option(help="Address of a running server.")] = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Show the usage of all tenants, or of one: depends on the key in TRIOLET_API_KEY."""
    from .usage_commands import show_usage

    show_usage(url, as_json=as_json)


@tenant_app.command("rotate")
def rotate(
    name: NameArgument,
    file: FileOption = DEFAULT_FILE,
    grace: Annotated[
        str,
        typer.Option(metavar="TIME", help="How long the old keys stay valid: 30m, 24h, 7d."),
    ] = "24h",
    now: Annotated[bool, typer.Option("--now", help="Revoke the old keys at once.")] = False,
    audit: AuditOption = None,
) -> None:
    """Give a tenant a new key and print it, once."""
    key = new_key()
    grace_s = 0 if now else _seconds(grace)
    with edited(file, Change(Action.TENANT_ROTATE, name, audit)) as document:
        rotate_keys(document, name, key, grace_s, datetime.now(UTC))
    old = "its old keys are revoked" if now else f"its old keys expire in {grace}"
    _say(f"{name} has a new key, {old}; {TAKEN}. The new key, which is not stored anywhere:")
    typer.echo(key)


@tenant_app.command("disable")
def disable(name: NameArgument, file: FileOption = DEFAULT_FILE, audit: AuditOption = None) -> None:
    """Disable a tenant: its keys get 403, and its running requests are cancelled."""
    with edited(file, Change(Action.TENANT_DISABLE, name, audit)) as document:
        set_disabled(document, name, is_disabled=True)
    _say(f"{name} is disabled; {TAKEN}")


@tenant_app.command("enable")
def enable(name: NameArgument, file: FileOption = DEFAULT_FILE, audit: AuditOption = None) -> None:
    """Enable a disabled tenant with the keys that it had."""
    with edited(file, Change(Action.TENANT_ENABLE, name, audit)) as document:
        set_disabled(document, name, is_disabled=False)
    _say(f"{name} is enabled; {TAKEN}")


def _read(file: Path) -> list[Tenant]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the tenants file cannot be read: {error}") from None
    return sorted(read_tenants(content, str(file)).by_name.values(), key=lambda one: one.name)


def _row(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "plan": tenant.plan.name,
        "role": tenant.role.value,
        "disabled": tenant.is_disabled,
        "keys": [
            {
                "digest": DIGEST_PREFIX + key.digest[:SHOWN_DIGITS],
                "until": None
                if key.until is None
                else datetime.fromtimestamp(key.until, UTC).isoformat(),
            }
            for key in tenant.keys
        ],
    }


def _word(value: object) -> str:
    if value is None:
        return "no limit"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(_word, value)) if isinstance(value, list | tuple) else str(value)


def _seconds(text: str) -> int:
    seconds = parse_span(text) or 0
    if not 0 < seconds <= MAX_GRACE_S:
        raise ConfigError(
            f"--grace is {text!r}; allowed: a number of s, m, h or d up to 366d, such as 24h "
            "(--now for none)"
        )
    return seconds


def _say(words: str) -> None:
    typer.echo(words, err=True)
