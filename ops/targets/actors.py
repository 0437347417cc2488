"""Names of a fleet's Ray actors, and how states of actors and nodes are reported to operators. No
I/O."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triolet.errors import ConfigError
from triolet.ids import Place, Role

from .target import Observed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from triolet.config import RayConfig

ZONE: Final = "zone"
"""Label of Ray's nodes that names their zone."""
SEPARATOR: Final = "/"
"""Separates the parts of an actor's name. Names of models, roles and zones do not contain it."""
MAX_LINE: Final = 200
"""Longest hindrance."""


class WorkerState(NamedTuple):
    """State of an actor's process.

    Attributes:
      is_ready: whether the process serves.
      pid: its process id; None while it does not run.
      zone: zone of its node.
      url: a ready server's address for clients.
      trouble: why it is not ready; empty if unknown.
      is_stuck: whether starting it failed and the next attempt is still to come.
    """

    is_ready: bool = False
    pid: int | None = None
    zone: str = ""
    url: str = ""
    trouble: str = ""
    is_stuck: bool = False


def require_place(place: Place, model: str, zones: Collection[str]) -> None:
    """Refuse a place that is not in the fleet's settings.

    Args:
      place: the place.
      model: name of the workers' model in the settings; servers have none.
      zones: zones in the settings; empty for a fleet without zones.

    Raises:
      ConfigError: the message has the given model or zone, and those in the settings.
    """
    own = "" if place.role is Role.SERVER else model
    if place.model != own:
        raise ConfigError(
            f"{place.role.value} is asked for the model {place.model!r}, but the settings have "
            f"{own!r} (worker.membership.model; none for servers); give "
            f"{place._replace(model=own, zone='')}=NUMBER, or the file of that model"
        )
    if place.zone not in (zones or ("",)):
        known = ", ".join(zones) or "none"
        raise ConfigError(
            f"the zone is {place.zone!r}, but ray.zones has: {known}; "
            + ("add --zone with one of them" if zones else "leave --zone out, or set ray.zones")
        )


def actor_name(place: Place, number: int) -> str:
    """Return the name of a process's actor."""
    return SEPARATOR.join((*place, str(number)))


def place_of(name: str) -> tuple[Place, int]:
    """Return the place and number in an actor's name."""
    model, role, zone, number = name.split(SEPARATOR)
    return Place(model, Role(role), zone), int(number)


def is_stand_in(place: Place, number: int) -> bool:
    """Return whether an actor stands in for lost ones: the first server's of each zone."""
    return place.role is Role.SERVER and number == 0


def stood_in_for(lost: Collection[str], place: Place, config: RayConfig) -> list[str]:
    """Return the names of the lost actors that a zone's stand-in stands in for: those of its zone,
    and of the zones before it, up to the next whose stand-in is not lost.

    Args:
      lost: names of the lost actors.
      place: a place of its zone and model.
      config: zones of the fleet, and whether workers need GPUs, which it does not reserve.
    """
    places = {name: place_of(name) for name in sorted(lost)}
    alone = [one.zone for one, number in places.values() if is_stand_in(one, number)]
    zones = config.zones or ("",)
    at = zones.index(place.zone)
    before = reversed((*zones[at + 1 :], *zones[:at]))
    covered = {place.zone, *takewhile(alone.__contains__, before)}
    roles = (Role.SERVER,) if config.gpus else Role
    return [
        name
        for name, (one, _) in places.items()
        if one.zone in covered and one.role in roles and one.model in ("", place.model)
    ]


def name_of(place: Place, number: int) -> str:
    """Return the name of a process in the fleet."""
    model = f"{place.model}." if place.model else ""
    return "-".join(filter(None, (f"{model}{place.role.value}", place.zone, str(number))))


def lacking(nodes: Iterable[Mapping[str, Any]], zone: str, needs: Mapping[str, float]) -> str:
    """Return what all nodes lack for a process; empty if a node could run it.

    Args:
      nodes: the cluster's nodes, as Ray lists them.
      zone: zone of the process; empty for any.
      needs: the resources that it reserves.
    """
    alive = [node for node in nodes if node["Alive"]]
    inside = [node for node in alive if zone in ("", node["Labels"].get(ZONE))]
    if not inside:
        known = sorted({node["Labels"].get(ZONE, "none") for node in alive})
        return f"no node has the label {ZONE}={zone} (zones: {', '.join(known)})"
    for name, amount in needs.items():
        most = max(node["Resources"].get(name, 0.0) for node in inside)
        if most < amount:
            where = f" of zone {zone}" if zone else ""
            return f"no node{where} has {amount:g} {name} (at most {most:g})"
    return ""


def observed(
    desired: int | None, place: Place, states: Mapping[int, WorkerState | str]
) -> Observed:
    """Return the observed state of a place.

    Args:
      desired: desired number of its processes.
      place: the place.
      states: states of its processes, or why they are unknown.
    """
    known = [one for one in states.values() if isinstance(one, WorkerState)]
    hindrances = [trouble_of(place, *each) for each in sorted(states.items())]
    if (num_missing := (desired or 0) - len(states)) > 0:
        hindrances.append(f"{num_missing} not started; `triolet fleet up` starts what is missing")
    return Observed(
        desired,
        sum(one.is_ready for one in known),
        tuple(filter(None, hindrances)),
        tuple(one.url for one in known if one.url),
    )


def trouble_of(place: Place, number: int, state: WorkerState | str) -> str:
    """Return in one line why a process does not serve in its zone; empty if it does."""
    trouble = state
    if isinstance(state, WorkerState):
        trouble = "" if state.is_ready else state.trouble or "it starts"
        if state.is_ready and state.zone != place.zone:
            trouble = f"it runs in zone {state.zone or 'none'}"
    return f"{name_of(place, number)}: {trouble}"[:MAX_LINE] if trouble else ""
