"""Test helper that runs two fleets on two addresses, which share idempotency keys and limits."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.server.tenants.redis_server import running_redis

from . import paced
from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, wait_until
from .tenants import MODEL, NAMED, OPERATOR, key_of, usage_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

NUM_TOKENS: Final = 24
ALICE: Final = "alice"
LEASE_S: Final = 2.0
"""Lease of reservations: longer than any pause of a server."""
PATH: Final = "/v1/completions"
BODY: Final[dict[str, Any]] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 1,
}
STREAM: Final = BODY | {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Hosts:
    """Two fleets on two addresses.

    Attributes:
      fleets: the two fleets.
      hold: the file that holds batch lines; see `paced.HOLD`.
    """

    fleets: tuple[FleetProcess, FleetProcess]
    hold: Path

    @property
    def addresses(self) -> list[str]:
        """Host and port of each server."""
        return [fleet.url.removeprefix("http://") for fleet in self.fleets]

    def tokens(self) -> int:
        """Return alice's tokens, once she has no reserved requests."""
        usage: dict[str, Any] = {}

        def is_settled() -> bool:
            usage.update(usage_of(self.fleets[1], ALICE))
            return bool(usage["in_flight"] == 0)

        wait_until(is_settled, PATIENCE_S, "nothing is reserved")
        tokens: int = usage["this_month"]["tokens"]
        return tokens


@contextmanager
def running_hosts(folder: Path, more: Mapping[str, object]) -> Iterator[Hosts]:
    """Run two fleets; afterwards they must be idle.

    Args:
      folder: folder for their files and logs.
      more: further settings of both.
    """
    tenants = write_tenants(folder / "tenants.toml", {ALICE: ""})
    secret = folder / "secret"
    secret.write_text("a secret of two hosts, thirty-two long")
    secret.chmod(0o600)
    hold = folder / "hold"
    with running_redis(folder) as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv(paced.HOLD, str(hold))
        (folder / "limits.url").write_text(redis.url)
        settings = {
            "server.hosts.secret_file": secret,
            "server.hosts.timeout_s": 10,
            "server.tenants.quotas.lease_s": LEASE_S,
            "server.tenants.quotas.call_timeout_s": 10,
        } | dict(more)
        options = [*WATCHED, *PATIENT, *NAMED, "--tenants", str(tenants)]
        options += ["--limits", f"@{folder / 'limits.url'}"]
        for name, value in settings.items():
            options += ["--set", f"{name}={value}"]
        fleets: list[FleetProcess] = []
        try:
            for number, name in enumerate("ab", 1):
                fleet = FleetProcess(
                    folder / f"{name}.log",
                    *options,
                    key=key_of(OPERATOR),
                    command=paced.COMMAND,
                    host=f"127.0.0.{number}",
                    url_setting="server.hosts.advertised_url",
                )
                fleets.append(fleet)
            for fleet in fleets:
                fleet.wait_ready()
            yield Hosts((fleets[0], fleets[1]), hold)
            for fleet in fleets:
                fleet.wait_at_rest()
        finally:
            for fleet in fleets:
                fleet.stop()


def wait_restarted(fleet: FleetProcess, victim: int) -> None:
    """Wait until a fleet serves again after its server was killed."""
    wait_until(lambda: fleet.pids("server") not in ([], [victim]), PATIENCE_S, "it is back")
    fleet.wait_ready()


def events_of(text: str) -> list[str]:
    """Return the events of a stream without its comments."""
    return [event for event in text.split("\n\n") if event and not event.startswith(":")]


def usage_told(text: str) -> int:
    """Return the token count that a complete stream reported."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if '"usage"' in line]
    [told] = [usage["total_tokens"] for line in lines if (usage := json.loads(line)["usage"])]
    assert text.endswith("data: [DONE]\n\n")
    return int(told)
