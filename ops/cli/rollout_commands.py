"""`triolet rollout start|status|pause|promote|rollback`: moves a model to another version in steps,
through the control process of a running fleet."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import typer

from triolet.errors import ConfigError
from triolet.units import parse_span

from ..exit_codes import CommandFailed
from .model_orders import AWAY_S, PortOption, as_meant, ask_control

ROUTE: Final = "/admin/rollouts"
WATCH_S: Final = 2.0
"""Interval of `--watch`, which is that of control's looks."""
NUMBER: Final = re.compile(r"\d[\d.]*(e[+-]?\d+)?")
"""Numbers of a verdict, which change with each look."""

rollout_app = typer.Typer(
    help="Move a model to another version in steps, judged by its requests.", no_args_is_help=True
)

NameArgument: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]
CostOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FACTOR", help="Accept so much device time, as 1.5x.")
]
StreamsOption: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Requests to it at once, in each server.")
]
TenantShareOption: TypeAlias = Annotated[
    str, typer.Option(metavar="PERCENT", help="Share of these that one tenant may have.")
]
TenantOption: TypeAlias = Annotated[
    list[str] | None, typer.Option(metavar="TENANT", help="Stays on the old one; repeatable.")
]
ZonesOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ZONE,…", help="One after another.", show_default="all zones at once"),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@rollout_app.command()
def start(
    name: NameArgument,
    to: Annotated[str, typer.Option(metavar="REF", help="Version, directory or GGUF file.")],
    steps: Annotated[
        str, typer.Option(metavar="PERCENT,…", help="Share of users in each step.")
    ] = "1,10,50,100",
    bake: Annotated[str, typer.Option(help="Shortest duration of a step.")] = "60s",
    max_step: Annotated[
        str, typer.Option("--max-step", help="Pause a step that has not ended by then.")
    ] = "1h",
    retention: Annotated[
        str | None,
        typer.Option(help="Keep the old version this long at 100 %.", show_default="as --bake"),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="First copy this share of requests to it."),
    ] = None,
    experiment: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Keep this share, and show the verdict only."),
    ] = None,
    accept_cost: CostOption = None,
    cap_streams: StreamsOption = None,
    cap_tenant_share: TenantShareOption = "100",
    exclude_tenant: TenantOption = None,
    min_requests: Annotated[int, typer.Option(min=1, help="To the new version in a step.")] = 200,
    min_buckets: Annotated[int, typer.Option(min=1, help="Groups of users they come from.")] = 20,
    zones: ZonesOption = None,
    no_golden: Annotated[
        bool, typer.Option("--no-golden", help="Do not compare answers to golden prompts.")
    ] = False,
    despite_freeze: Annotated[
        bool, typer.Option("--despite-freeze", help="Begin and go on while rollouts are frozen.")
    ] = False,
    port: PortOption = None,
) -> None:
    """Start a rollout, and return; `triolet rollout status --watch` follows it."""
    body: dict[str, Any] = {
        "model": name,
        "ref": as_meant(to),
        "shares": [_number(one, "--steps", "%") / 100 for one in steps.split(",")],
        "bake_s": _span_s(bake, "--bake"),
        "max_step_s": _span_s(max_step, "--max-step"),
        "retention_s": retention and _span_s(retention, "--retention"),
        "shadow_share": shadow and _number(shadow, "--shadow", "%") / 100,
        "experiment": experiment and _number(experiment, "--experiment", "%") / 100,
        "accept_cost": accept_cost and _number(accept_cost, "--accept-cost", "x"),
        "cap_streams": cap_streams,
        "cap_tenant_share": _number(cap_tenant_share, "--cap-tenant-share", "%") / 100,
        "excluded_tenants": exclude_tenant or [],
        "min_requests": min_requests,
        "min_buckets": min_buckets,
        "golden": not no_golden,
        "despite_freeze": despite_freeze,
        "zones": zones.split(",") if zones else [],
    }
    typer.echo("\n".join(shown(ask_control(port, "POST", ROUTE, body))))
    typer.echo(f"follow it with `triolet rollout status {name} --watch`", err=True)


@rollout_app.command()
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Model.", show_default="all")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print each change, until the rollout is over.")
    ] = False,
    as_json: JsonOption = False,
    port: PortOption = None,
) -> None:
    """Show the latest rollout of each model."""
    if watch and name is None:
        raise ConfigError("--watch needs the name of a model; give NAME")
    if name is None:
        _show(ask_control(port, "GET", ROUTE)["rollouts"], as_json=as_json)
        return
    found = ask_control(port, "GET", f"{ROUTE}/{name}")
    _show([found], as_json=as_json)
    answered = time.monotonic()
    while watch and not found["is_over"]:
        if found["is_left"]:
            raise CommandFailed(f"{name}: {found['trouble']}")
        time.sleep(WATCH_S)
        try:
            before, found = found, ask_control(port, "GET", f"{ROUTE}/{name}")
        except CommandFailed:  # control is being restarted, or has not read its store yet
            if time.monotonic() - answered >= AWAY_S:
                raise
            continue
        answered = time.monotonic()
        if _without_counts(found) != _without_counts(before):
            _show([found], as_json=as_json)


def _show(rollouts: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(rollouts).decode())
        return
    for one in rollouts:
        typer.echo("\n".join(shown(one)))


def _without_counts(rollout: dict[str, Any]) -> list[object]:
    """Return the parts of a rollout whose changes `--watch` prints."""
    said = NUMBER.sub("", rollout["said"])
    return [said, *(rollout[field] for field in ("phase", "step", "history", "trouble", "is_over"))]


@rollout_app.command()
def pause(name: NameArgument, port: PortOption = None) -> None:
    """Keep the current share until `promote` or `rollback`; the guard still rolls back."""
    _order(name, "pause", port)


@rollout_app.command()
def promote(
    name: NameArgument,
    full: Annotated[bool, typer.Option("--full", help="Go to 100 % at once.")] = False,
    port: PortOption = None,
) -> None:
    """Go to the next step without waiting for evidence; at 100 %, end the rollout."""
    _order(name, "promote_fully" if full else "promote", port)


@rollout_app.command()
def rollback(name: NameArgument, port: PortOption = None) -> None:
    """Send all new requests to the old version, and remove the new one."""
    _order(name, "rollback", port)


def _order(name: str, order: str, port: int | None) -> None:
    # Another operator's order in the meantime makes this one fail, unless it is a rollback.
    seen = None
    if order != "rollback":
        seen = ask_control(port, "GET", f"{ROUTE}/{name}")["revision"]
    found = ask_control(port, "POST", f"{ROUTE}/{name}/{order}", {"revision": seen})
    typer.echo("\n".join(shown(found)))


def shown(rollout: dict[str, Any]) -> list[str]:
    """Return the lines about a rollout: its phase, verdict, counts and changes."""
    step, shares = rollout["step"], rollout["shares"]
    stable, candidate = rollout["stable"], rollout["candidate"]
    where = f", step {step} of {len(shares)}" if step else ""
    share = f"{100 * rollout['share']:.4g} %"
    lines = [
        f"{rollout['model']}: {rollout['phase']}{where}; {share} of requests to {candidate}, "
        f"the others to {stable}  (rollout {rollout['id']})"
    ]
    lines += [f"  {text}" for text in (rollout["said"], rollout["trouble"]) if text]
    for signal, (good, bad, canary_good, canary_bad) in rollout["counts"].items():
        lines.append(
            f"  {signal}: {stable} {bad} bad of {good + bad}, {candidate} {canary_bad} bad of "
            f"{canary_good + canary_bad}"
        )
    if rollout["cost"] is not None:
        low, high = rollout["cost"]
        lines.append(f"  device time for the same work: {low:.2f} to {high:.2f} times {stable}'s")
    for note in rollout["history"]:
        at = datetime.fromtimestamp(note["at"]).astimezone().strftime("%H:%M:%S")
        lines.append(f"  {at}  {note['phase']}, step {note['step']}: {note['said']}")
    return lines


def _number(text: str, option: str, unit: str) -> float:
    try:
        return float(text.strip().removesuffix(unit))
    except ValueError:
        raise ConfigError(f"{option} has {text!r}, which is no number") from None


def _span_s(text: str, option: str) -> int:
    span_s = parse_span(text)
    if not span_s:
        raise ConfigError(f"{option} is {text!r}; allowed: a duration such as 60s, 30m or 2h")
    return span_s
