"""Where a server's routes come from, and which of them it uses: temporary routes, those of
rollouts, go before permanent ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from triolet.config.routes import Route


class _TemporaryRoute(NamedTuple):
    """A temporary route.

    Attributes:
      told: the route as control told it.
      until_s: Unix time until which it counts.
      ends_at: the same on the monotonic clock.
    """

    told: Route
    until_s: float
    ends_at: float


class TemporaryRoutes:
    """Keeps temporary routes until they are withdrawn or expire. The monotonic clock decides, so
    that setting back the wall clock does not prolong them.

    Args:
      max_ahead_s: see RoutesConfig.
    """

    def __init__(self, max_ahead_s: float) -> None:
        self._max_ahead_s = max_ahead_s
        self._held: dict[str, _TemporaryRoute] = {}

    def use(self, told: Mapping[str, Route], wall_s: float, now: float) -> None:
        """Use these routes and no others. Only a later time than before renews a route: repeated
        news of a control that renews nothing do not prolong it.

        Args:
          told: the routes, each with the time until which it is valid. One that may not follow its
            predecessor is ignored.
          wall_s: Unix time.
          now: monotonic time.
        """
        held = {name: self._held[name] for name in told.keys() & self._held.keys()}
        for name, route in told.items():
            told_s = math.inf if route.valid_until is None else route.valid_until
            until_s = min(told_s, wall_s + self._max_ahead_s)
            ends_at = now + until_s - wall_s
            if name in held:
                before = held[name]
                if not route.may_follow(before.told):
                    continue
                if before.told.valid_until is not None and told_s <= before.told.valid_until:
                    until_s = min(until_s, before.until_s)
                    ends_at = min(ends_at, before.ends_at)
            held[name] = _TemporaryRoute(route, until_s, ends_at)
        self._held = held

    def valid(self, now: float) -> dict[str, Route]:
        """Return the routes that have not expired at this monotonic time."""
        return {
            name: replace(one.told, valid_until=one.until_s)
            for name, one in self._held.items()
            if now < one.ends_at
        }

    def next_end(self, now: float) -> float | None:
        """Return the monotonic time at which the next route expires; None without any."""
        return min((one.ends_at for one in self._held.values() if now < one.ends_at), default=None)


class RefusedRoute(NamedTuple):
    """A route that cannot be used.

    Attributes:
      name: its public name.
      reason: why, for the log.
      missing: versions that the server does not have.
    """

    name: str
    reason: str
    missing: frozenset[str]


class RouteSources:
    """Chooses the routes that a server uses.

    Args:
      routes: permanent routes that it uses already.
      max_ahead_s: see RoutesConfig.

    Attributes:
      of_file: permanent routes of the members file.
      of_control: permanent routes of a control on another host; they go before those of the file.
      temporary: temporary routes of control.
    """

    def __init__(self, routes: Mapping[str, Route], max_ahead_s: float) -> None:
        self.of_file = routes
        self.of_control: dict[str, Route] = {}
        self.temporary = TemporaryRoutes(max_ahead_s)
        self._followed = dict(routes)
        self._refused: dict[str, Route] = {}

    def hear(self, routes: Mapping[str, Route], wall_s: float, now: float) -> bool:
        """Take the routes of control's news; return whether something has changed. Permanent ones
        stay if the news no longer name them, temporary ones do not.

        Args:
          routes: the routes.
          wall_s: Unix time.
          now: monotonic time.
        """
        before = self._each(now)
        temporary = {name: one for name, one in routes.items() if one.valid_until is not None}
        self.of_control |= {name: one for name, one in routes.items() if name not in temporary}
        self.temporary.use(temporary, wall_s, now)
        return self._each(now) != before

    @property
    def permanent(self) -> dict[str, Route]:
        """The permanent routes."""
        return {**self.of_file, **self.of_control}

    def _each(self, now: float) -> tuple[dict[str, Route], dict[str, Route]]:
        return self.temporary.valid(now), self.permanent

    def usable(
        self, before: Mapping[str, Route], present: Collection[str], now: float
    ) -> tuple[dict[str, Route], list[RefusedRoute]]:
        """Return the routes to use, and those that are refused for the first time. If no route of a
        name can be used, the previous one stays until its versions exist or the order changes it. A
        version with no share may be missing.

        Args:
          before: the routes in use.
          present: versions that the server has.
          now: monotonic time.
        """
        valid, permanent = self._each(now)
        routes: dict[str, Route] = {}
        refused: dict[str, Route] = {}
        new: list[RefusedRoute] = []
        for name, route in (*valid.items(), *permanent.items()):
            if name in routes:
                continue
            used = {route.stable, *(one for one, share in route.shares.items() if share)}
            missing = used.difference(present)
            # Temporary ones are in order already: revisions count for each source on its own.
            is_next = route is valid.get(name) or route.may_follow(self._followed.get(name))
            if not missing and is_next:
                routes[name] = route
                continue
            refused[name] = replace(route, valid_until=None)
            if self._refused.get(name) != refused[name]:
                reason = (
                    f"this server has no version {', '.join(sorted(missing))}"
                    if missing
                    else f"revision {route.revision} is not above the one that is used"
                )
                new.append(RefusedRoute(name, reason, frozenset(missing)))
        for name in refused.keys() & before.keys() - routes.keys():
            routes[name] = before[name]
            if name not in valid and before[name] != self._followed.get(name):
                # It was temporary and is withdrawn: it must not lead to its other versions.
                routes[name] = replace(before[name], valid_until=0.0)
        self._refused = refused
        return routes, new

    def note_used(self, routes: Mapping[str, Route]) -> None:
        """Record the routes in use, which the next permanent ones must follow."""
        permanent = self.permanent
        used = {name: one for name, one in routes.items() if one == permanent.get(name)}
        followed = self._followed | used
        self._followed = {name: one for name, one in followed.items() if name in permanent}


def lasting(routes: Mapping[str, Route]) -> dict[str, Route]:
    """Return routes without their times, which change with each renewal."""
    return {name: replace(one, valid_until=None) for name, one in routes.items()}
