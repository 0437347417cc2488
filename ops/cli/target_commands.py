"""Commands that start, stop and resize a fleet on this machine, Ray or Kubernetes: `triolet fleet
up`, `down` and `status`, and `triolet scale`. ops/targets does the work.
"""

from __future__ import annotations

import re
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import trio
import typer

from triolet.errors import ConfigError
from triolet.ids import Place, Role

from ..audit.events import Action
from ..audit.recording import recorded
from ..chosen_fleet import fleet_to_change
from ..settings.sources import SettingSources  # noqa: TC001
from ..targets.target import together
from .options import AuditOption, FleetPortOption, with_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..settings.form import Settings
    from ..targets.ray_target import RayTarget
    from ..targets.target import Observed, Target

fleet_app = typer.Typer(
    help="Start and stop a fleet on Ray; show the workers of any fleet.", no_args_is_help=True
)


class Where(StrEnum):
    """Kinds of targets: the values of `--on` without an address."""

    LOCAL = "local"
    KUBERNETES = "kubernetes"
    RAY = "ray"


RAY_ADDRESS: Final = re.compile(r"ray(://[\w.-]+:\d{1,5})?")
SCALE: Final = re.compile(
    r"(?:(?P<model>[^=]+)\.)?(?P<role>prefill|decode|server)=(?P<count>\d{1,4})"
)
MAX_HINDRANCES: Final = 3
"""Reasons that `fleet status` shows for one model, role and zone."""

OnOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="WHERE",
        help="Where the fleet runs: local, kubernetes, ray, ray://HOST:PORT.",
    ),
]
RayOption: TypeAlias = Annotated[
    str, typer.Option("--on", metavar="WHERE", help="The cluster: ray, or ray://HOST:PORT.")
]
ZoneOption: TypeAlias = Annotated[str, typer.Option(help="Zone of the workers.")]


def opened(on: str, settings: Settings, port: int | None) -> AbstractAsyncContextManager[Target]:
    """Open a target.

    Args:
      on: the value of `--on`.
      settings: settings of the fleet, unless it is local.
      port: port of the local fleet, if several run.

    Raises:
      ConfigError: `--on` is invalid, or a setting is missing.
      CommandFailed: the target does not answer.
    """
    if on == Where.LOCAL:
        from ..targets.local import LocalTarget

        return nullcontext(LocalTarget(fleet_to_change(port)))
    if on == Where.KUBERNETES:
        from ..targets.desired import DesiredStore
        from ..targets.kubernetes import KubernetesTarget

        membership = settings.server.membership.redis
        members = DesiredStore(membership) if membership.url else None
        return nullcontext(KubernetesTarget(DesiredStore(settings.server.desired_redis), members))
    if RAY_ADDRESS.fullmatch(on) is None:
        raise ConfigError(f"--on is {on!r}; allowed: {', '.join(Where)}, ray://HOST:PORT")
    return opened_ray(on, settings)


def opened_ray(on: str, settings: Settings) -> AbstractAsyncContextManager[RayTarget]:
    """Open a fleet on Ray.

    Raises:
      ConfigError: Ray is not installed, or the fleet lacks a setting.
    """
    if RAY_ADDRESS.fullmatch(on) is None:
        raise ConfigError(
            f"--on is {on!r}, but this command is for Ray; allowed: ray, ray://HOST:PORT"
        )
    settings = _of_fleet(settings)
    from ..targets.desired import DesiredStore

    try:
        from ..targets.ray_target import connected
    except ModuleNotFoundError as error:
        if error.name != Where.RAY:
            raise
        raise ConfigError("--on ray needs Ray; `pip install 'triolet[ray]'` installs it") from None
    return connected(on, settings, DesiredStore(settings.server.desired_redis))


def _of_fleet(settings: Settings) -> Settings:
    """Return the settings for processes on Ray. Paths become absolute, because those processes
    have other working directories.

    Raises:
      ConfigError: a required setting is missing.
    """
    for name, value in (
        ("server.membership.redis.url", settings.server.membership.redis.url),
        ("worker.membership.redis.url", settings.decode.membership.redis.url),
        ("server.curve_dir", settings.server.curve_dir),
        ("worker.curve_dir", settings.decode.curve_dir),
    ):
        if not value:
            raise ConfigError(
                f"{name} is missing; processes on Ray find each other by Redis, and their links "
                "need keys"
            )
    ref = settings.fleet.model
    if ref is not None and Path(ref).exists():
        ref = str(Path(ref).absolute())
    return replace(settings, fleet=replace(settings.fleet, model=ref))


@fleet_app.command()
@with_settings()
def up(sources: SettingSources, on: RayOption = Where.RAY, audit: AuditOption = None) -> None:
    """Start a fleet on Ray, or the processes that are missing. Their numbers come from the first
    start or `triolet scale` until `triolet fleet down`; later changes in the file are ignored."""
    with recorded(Action.FLEET_UP, on, folder=audit):
        trio.run(_up, on, sources.settings())


@fleet_app.command()
@with_settings()
def down(sources: SettingSources, on: RayOption = Where.RAY, audit: AuditOption = None) -> None:
    """Drain and stop all processes of a fleet on Ray."""
    with recorded(Action.FLEET_DOWN, on, folder=audit):
        trio.run(_down, on, sources.settings())


@fleet_app.command()
@with_settings()
def status(
    sources: SettingSources, on: OnOption = Where.LOCAL, port: FleetPortOption = None
) -> None:
    """Show how many of the desired processes serve, and why the others do not."""
    for line in shown(trio.run(_observed, on, sources.settings(), port)):
        typer.echo(line)


def shown(places: Mapping[Place, Observed]) -> list[str]:
    """Return the lines of `fleet status`."""
    lines = []
    for place, observed in places.items():
        wanted = observed.desired
        of = ", and no number was asked for" if wanted is None else f" of {wanted}"
        known = f"{observed.alive}{of}"
        pods = f"desired {wanted}; `kubectl get pods` shows the pods"
        lines.append(f"{place}: {pods if observed.alive is None else known}")
        hindrances = observed.hindrances
        lines += [f"  {line}" for line in (*observed.urls, *hindrances[:MAX_HINDRANCES])]
        if len(hindrances) > MAX_HINDRANCES:
            lines.append(f"  and {len(hindrances) - MAX_HINDRANCES} more")
    return lines


def run_scale(
    targets: Sequence[str],
    on: str,
    zone: str,
    settings: Settings,
    port: int | None,
    audit: Path | None,
) -> None:
    """Change the number of workers of models, and print each step.

    Args:
      targets: `decode=3`, or `chat.decode=3` for one of several models.
      on: the value of `--on`.
      zone: zone of the workers; empty without zones.
      settings: settings of the fleet, unless it is local.
      port: port of the local fleet, if several run.
      audit: directory of the audit log; None for this user's.

    Raises:
      ConfigError: a target is invalid or given twice, its role or zone cannot be scaled there, or
        several fleets run and no port is given. Nothing was changed.
      CommandFailed: no fleet runs, or a target was not reached.
      AuditLogError: the command could not be recorded and was not started.
    """
    given = [_wanted(target, zone) for target in targets]
    wanted = dict(given)
    if len(wanted) < len(given):
        raise ConfigError(
            f"{' '.join(targets)} names the same workers twice; give one number for them"
        )
    where = f"port {fleet_to_change(port).note.port}" if on == Where.LOCAL else on
    subject = f"{where}: {', '.join(targets)}{f' in {zone}' if zone else ''}"
    with recorded(Action.FLEET_SCALE, subject, folder=audit):
        trio.run(_scale, on, settings, port, wanted)


def _wanted(target: str, zone: str) -> tuple[Place, int]:
    found = SCALE.fullmatch(target)
    if found is None:
        raise ConfigError(
            f"{target!r} is not a target; allowed: [MODEL.]ROLE=NUMBER, such as decode=2"
        )
    return Place(found["model"] or "", Role(found["role"]), zone), int(found["count"])


async def _up(on: str, settings: Settings) -> None:
    fleet, model = settings.fleet, settings.decode.membership.model
    counts = (
        (Place(model, Role.DECODE), fleet.decode),
        (Place(model, Role.PREFILL), fleet.prefill),
        (Place("", Role.SERVER), fleet.servers),
    )
    tell = _teller()
    async with opened_ray(on, settings) as target:
        observed = await target.observe()
        zones = settings.ray.zones or ("",)
        wanted = {one._replace(zone=zone): count for one, count in counts for zone in zones}
        for place, seen in observed.items():
            if seen.desired is not None and seen.desired != wanted.get(place, seen.desired):
                wanted[place] = seen.desired
                tell(
                    f"{place} stays at {seen.desired}, as asked for before; "
                    "`triolet scale` changes it"
                )
        await together(partial(target.scale, *each, tell) for each in wanted.items())
    tell("done: every process is ready")


async def _down(on: str, settings: Settings) -> None:
    tell = _teller()
    async with opened_ray(on, settings) as target:
        await target.stop_all(tell)
    tell("done: no process is left")


async def _scale(
    on: str, settings: Settings, port: int | None, wanted: Mapping[Place, int]
) -> None:
    tell = _teller()
    async with opened(on, settings, port) as target:
        for place in wanted:
            target.check(place)
        for place, count in wanted.items():
            await target.scale(place, count, tell)
            tell(f"done: {place}={count}")


async def _observed(on: str, settings: Settings, port: int | None) -> dict[Place, Observed]:
    async with opened(on, settings, port) as target:
        return await target.observe()


def _teller() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: typer.echo(f"{time.monotonic() - began:6.1f} s  {text}")
