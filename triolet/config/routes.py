"""Routes: split the requests for one public model name among several versions of the model.

A version is a model of the server with its own queue, workers and KV; clients see only the public
name. The choice is a pure function of route, tenant and request key. The settings of routes and of
rollouts' candidates are here, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal

import msgspec

from ..errors import ConfigError
from ..units import SECONDS
from .limits import Count, Positive, Share  # noqa: TC001 (msgspec reads the annotations)
from .models import MAX_MODELS

POINT_BYTES: Final = 8
"""Bytes of the hash that maps a request to [0, 1): precise to far less than one request."""
NUM_BUCKETS: Final = 10_000
"""Buckets of users. A rollout assigns whole buckets to versions and counts evidence by bucket, so
this bounds its memory; 1 % is 100 buckets. A user's bucket is `user_hash(…) % NUM_BUCKETS`."""
MIN_CAPPED: Final = 4
"""Requests below which no tenant's share of them is too large: of one request, one tenant has all.
"""


@dataclass(frozen=True, slots=True)
class RoutesConfig:
    """How servers follow routes from a model name to its versions."""

    key: Literal["user", "tenant"] = "user"
    """Whose requests stay together on one version: those of one user, or of a whole tenant. Set
    `tenant` if users of one tenant must never see two versions side by side."""
    max_ahead_s: Positive = 10.0 * SECONDS
    """Longest time for which a temporary route counts without a renewal, by this server's clock.
    Control renews routes every 2 s, so four renewals may be lost, and says by its own clock until
    when they are valid: a server with a slow clock must not keep a bad version for longer."""
    first_news_s: Positive = 2.0 * SECONDS
    """A server that starts during a rollout waits at most this long for control before it accepts
    clients: without the temporary route, it would send users of the candidate back to the stable
    version. Control answers within half a second, and within two if it restarts as well."""
    max_observed: Count = 10_000
    """Ended requests of models with a rollout that wait for control; then the oldest are dropped,
    and counted. 4 MB, and at 1,000 requests per second ten seconds: control restarts in less."""


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    """Golden prompts and shadow copies for the candidates of rollouts."""

    golden_deadline_s: Positive = 30.0 * SECONDS
    """For one golden prompt, its wait included: an idle candidate answers within a second, and
    workers that restart return within this time."""
    golden_tokens: Count = 16
    """Tokens of each answer. A changed weight or kernel rarely moves the first few tokens; each one
    costs a row of a step."""
    max_copies: Count = 4
    """Shadow copies that run at once: they share the machine with the stable version, and a few are
    enough to compare."""
    news_s: Positive = 10.0 * SECONDS
    """Without news of control for this long, golden prompts and copies stop until it returns, as
    the route of a rollout expires."""


def user_hash(tenant: str, user: str) -> int:
    """Return a number of 64 bits for a user, the same in every process and rollout.

    Args:
      tenant: name of the tenant; empty where there are none.
      user: what the tenant calls the user; empty for the tenant as a whole.
    """
    digest = blake2b(msgspec.json.encode((tenant, user)), digest_size=POINT_BYTES).digest()
    return int.from_bytes(digest)


class RouteCaps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds of the requests to versions that are not the stable one, in each server process.

    Above them, new requests get the stable version.

    Attributes:
      streams: requests that run or wait at once; None for any number.
      tenant_share: share of these that one tenant may have, from MIN_CAPPED requests on.
    """

    streams: Count | None = None
    tenant_share: Share = 1.0


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The versions behind one public name.

    Attributes:
      shares: shares of new requests by version; only their ratios matter.
      stable: version for excluded tenants, and for everyone once the route has expired.
      revision: grows with each change; servers ignore a lower one.
      salt: a different one distributes requests differently.
      excluded_tenants: tenants that always get the stable version.
      valid_until: Unix time at which a temporary route expires unless renewed; None for a permanent
        one.
      caps: bounds of the requests to other versions than the stable one; None for none.
    """

    shares: dict[str, float]
    stable: str
    revision: int
    salt: str = ""
    excluded_tenants: tuple[str, ...] = ()
    valid_until: float | None = None
    caps: RouteCaps | None = None

    def version_for(self, tenant: str, key: str, now_s: float) -> str:
        """Return the version for a request.

        If a version's share grows, requests only move to it, not between the others; with two
        versions a request that has moved does not move back.

        Args:
          tenant: name of the tenant; empty where there are none.
          key: requests with the same key get the same version. Servers use the user's bucket.
          now_s: Unix time.
        """
        if self.is_over(now_s) or tenant in self.excluded_tenants:
            return self.stable
        digest = blake2b(msgspec.json.encode((self.salt, key)), digest_size=POINT_BYTES).digest()
        point = int.from_bytes(digest) / 2 ** (8 * POINT_BYTES) * sum(self.shares.values())
        for version in sorted(self.shares.keys() - {self.stable}):
            point -= self.shares[version]
            if point < 0:
                return version
        return self.stable

    def is_over(self, now_s: float) -> bool:
        """Return whether it has expired."""
        return self.valid_until is not None and now_s >= self.valid_until

    def may_stay(self, version: str, tenant: str, now_s: float) -> bool:
        """Return whether a conversation that began on a version continues there: new requests get
        that version, too."""
        if self.is_over(now_s) or tenant in self.excluded_tenants:
            return version == self.stable
        return self.shares.get(version, 0.0) > 0

    def may_follow(self, before: Route | None) -> bool:
        """Return whether this may replace a route: its revision is higher, or it only renews that
        one."""
        if before is None or self.revision > before.revision:
            return True
        return self == msgspec.structs.replace(before, valid_until=self.valid_until)


def require_routes(routes: dict[str, Route], name: str) -> None:
    """Check that routes can be used together.

    Args:
      routes: routes by public name.
      name: name of the file, for errors.

    Raises:
      ConfigError: a route is invalid, or two routes have the same version.
    """
    if len(routes) > MAX_MODELS:
        raise ConfigError(f"{name} has {len(routes)} routes; allowed: {MAX_MODELS}")
    owners: dict[str, str] = {}
    for public, route in routes.items():
        shares = route.shares
        if not all(math.isfinite(share) and share >= 0 for share in shares.values()):
            raise ConfigError(f"{name}: a share of route {public!r} is not a number of at least 0")
        if sum(shares.values()) <= 0 or route.stable not in shares:
            raise ConfigError(
                f"{name}: route {public!r} needs a share above 0, and a share for its stable "
                f"version {route.stable!r} (it may be 0)"
            )
        for version in shares:
            if owners.setdefault(version, public) != public:
                raise ConfigError(
                    f"{name}: version {version!r} is in the routes {owners[version]!r} and "
                    f"{public!r}; a version has one public name"
                )
