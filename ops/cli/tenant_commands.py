"""`triolet tenant`: tenants and keys in the file that a server reads (`--tenants`).

A key is printed once, alone on stdout, so that a script can keep it; all other text goes to
stderr. tenant_edit.py changes the file.
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

tenant_app = typer.Typer(help="Who may use a server: tenants and their keys.", no_args_is_help=True)

DEFAULT_FILE: Final = Path("tenants.toml")
DEFAULT_URL: Final = "http://127.0.0.1:8000"
SHOWN_DIGITS: Final = 12
"""Of a digest: enough to tell keys apart."""
MAX_GRACE_S: Final = 366 * 86_400
TAKEN: Final = "servers that were started with it notice within 2 s"

FileOption: TypeAlias = Annotated[
    Path, typer.Option("--tenants", metavar="FILE", help="The file of tenants.")
]
NameArgument: TypeAlias = Annotated[str, typer.Argument(metavar="NAME")]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="For programs.")]


@tenant_app.command("add")
def add(
    name: NameArgument,
    file: FileOption = DEFAULT_FILE,
    plan: Annotated[str, typer.Option(help="Its limits, by a plan of the file.")] = DEFAULT_PLAN,
    role: Annotated[
        TenantRole, typer.Option(help="An operator's keys also open metrics and /fleet.")
    ] = TenantRole.USER,
    audit: AuditOption = None,
) -> None:
    """Add a tenant and show its key, once. Makes the file if there is none."""
    key = new_key()
    change = Change(Action.TENANT_ADD, name, audit)
    with edited(file, change, may_make=True) as document:
        add_tenant(document, name, key, plan, role)
    _say(f"{name} is in {file}; {TAKEN}. Its key, which is stored nowhere:")
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
    """Show one tenant, its keys by the beginning of their digests, and its plan."""
    tenant = next((one for one in _read(file) if one.name == name), None)
    if tenant is None:
        raise ConfigError(f"there is no tenant {name!r}; `triolet tenant list` shows them")
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
    url: Annotated[str, typer.Option(help="A running server.")] = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Show what tenants have used: all with an operator's key in TRIOLET_API_KEY, or its own."""
    from .tenant_usage import show_usage

    show_usage(url, as_json=as_json)


@tenant_app.command("rotate")
def rotate(
    name: NameArgument,
    file: FileOption = DEFAULT_FILE,
    grace: Annotated[
        str,
        typer.Option(metavar="TIME", help="The old keys stay good for this long: 30m, 24h, 7d."),
    ] = "24h",
    now: Annotated[bool, typer.Option("--now", help="The old keys end at once.")] = False,
    audit: AuditOption = None,
) -> None:
    """Give a tenant another key and show it, once."""
    key = new_key()
    grace_s = 0 if now else _seconds(grace)
    with edited(file, Change(Action.TENANT_ROTATE, name, audit)) as document:
        rotate_keys(document, name, key, grace_s, datetime.now(UTC))
    old = "its old keys end now" if now else f"its old keys end in {grace}"
    _say(f"{name} has a new key, {old}; {TAKEN}. The new key, which is stored nowhere:")
    typer.echo(key)


@tenant_app.command("disable")
def disable(name: NameArgument, file: FileOption = DEFAULT_FILE, audit: AuditOption = None) -> None:
    """Shut a tenant out: its keys get 403, and what runs for it ends."""
    with edited(file, Change(Action.TENANT_DISABLE, name, audit)) as document:
        set_disabled(document, name, is_disabled=True)
    _say(f"{name} is disabled; {TAKEN}")


@tenant_app.command("enable")
def enable(name: NameArgument, file: FileOption = DEFAULT_FILE, audit: AuditOption = None) -> None:
    """Let a tenant in again, by the keys that it had."""
    with edited(file, Change(Action.TENANT_ENABLE, name, audit)) as document:
        set_disabled(document, name, is_disabled=False)
    _say(f"{name} is enabled; {TAKEN}")


def _read(file: Path) -> list[Tenant]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the file of tenants cannot be read: {error}") from None
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
