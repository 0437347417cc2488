"""Routes: which versions of a model answer under one public name, and which of them a request gets.

A version is a model of the server. Its queue, workers and KV are its own; clients see the public
name. The choice is a pure function of the route, the tenant and the request's key.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Final

import msgspec

from ..errors import ConfigError
from .models import MAX_MODELS

POINT_BYTES: Final = 8
"""Of the hash that places a request in [0, 1): shares are met to far less than one request."""


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The versions behind one public name.

    Attributes:
      shares: of new requests, by the name of the version; only their ratios count.
      stable: version of excluded tenants, and of everybody once the route has expired.
      revision: grows with each change of the route; servers ignore a lower one.
      salt: another one deals the requests out differently.
      excluded_tenants: names of tenants that always get the stable version.
      valid_until: Unix time at which a temporary route expires unless it is renewed; None for a
        permanent one.
    """

    shares: dict[str, float]
    stable: str
    revision: int
    salt: str = ""
    excluded_tenants: tuple[str, ...] = ()
    valid_until: float | None = None

    def version_for(self, tenant: str, key: str, now_s: float) -> str:
        """Return the version that a request gets.

        A larger share of one version moves requests to it and none between the others' starts, so
        with two versions a request that has moved does not move back.

        Args:
          tenant: name of the tenant; empty where there are none.
          key: what stays the same while requests are to stay on one version.
          now_s: Unix time.
        """
        is_over = self.valid_until is not None and now_s >= self.valid_until
        if is_over or tenant in self.excluded_tenants:
            return self.stable
        digest = blake2b(msgspec.json.encode((self.salt, key)), digest_size=POINT_BYTES).digest()
        point = int.from_bytes(digest) / 2 ** (8 * POINT_BYTES) * sum(self.shares.values())
        for version in sorted(self.shares.keys() - {self.stable}):
            point -= self.shares[version]
            if point < 0:
                return version
        return self.stable

    def may_follow(self, before: Route | None) -> bool:
        """Whether this may replace a route: its revision is higher, or it only renews that one."""
        if before is None or self.revision > before.revision:
            return True
        return self == msgspec.structs.replace(before, valid_until=self.valid_until)


def require_routes(routes: dict[str, Route], name: str) -> None:
    """Look whether routes can be used together.

    Args:
      routes: by their public names.
      name: of the file that has them.

    Raises:
      ConfigError: one cannot be used, or two have one version.
    """
    if len(routes) > MAX_MODELS:
        raise ConfigError(f"{name} has {len(routes)} routes; allowed: {MAX_MODELS}")
    owners: dict[str, str] = {}
    for public, route in routes.items():
        shares = route.shares
        if not all(math.isfinite(share) and share >= 0 for share in shares.values()):
            raise ConfigError(f"{name}: a share of route {public!r} is no number of at least 0")
        if sum(shares.values()) <= 0 or route.stable not in shares:
            raise ConfigError(
                f"{name}: route {public!r} needs a share above 0, and a share for its stable "
                f"version {route.stable!r} (it may be 0)"
            )
        for version in shares:
            if owners.setdefault(version, public) != public:
                raise ConfigError(
                    f"{name}: version {version!r} is in the routes {owners[version]!r} and "
                    f"{public!r}; one version has one public name"
                )
