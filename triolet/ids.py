"""Ids of requests, attempts and processes: random and never reused; roles, and places of
processes."""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple

REQUEST_ID_BYTES = 16
SECRET_BYTES = 32


class Role(StrEnum):
    """A process's part in the fleet."""

    SERVER = "server"
    PREFILL = "prefill"
    DECODE = "decode"
    CONTROL = "control"
    """Decides which models of a fleet are loaded; has no links to workers."""
    OPERATOR = "operator"
    """A command of a person or a supervisor: asks workers to drain, and sends no requests."""


class Place(NamedTuple):
    """A group of processes with one desired number.

    Attributes:
      model: name of the model; empty for the first or only model.
      role: their role.
      zone: their zone; empty without zones.
    """

    model: str
    role: Role
    zone: str = ""

    def __str__(self) -> str:
        """Return the place as written for `triolet scale`."""
        model = f"{self.model}." if self.model else ""
        zone = f" --zone {self.zone}" if self.zone else ""
        return f"{model}{self.role.value}{zone}"


class AttemptKey(NamedTuple):
    """One try at a request. After the death of a worker, a preemption or a drain the next one
    begins.

    Attributes:
      request_id: 16 random bytes.
      attempt: 0 for the first.
    """

    request_id: bytes
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id.hex()}/{self.attempt}"


LIVES: Final = 256
"""Most epochs of one process between two that a peer hears of."""
_IDENTITY: Final = re.compile(rb"[a-z]+:([!-~]{1,255}):([0-9a-f]{16})")
"""What `PeerId.identity` returns."""


class PeerId(NamedTuple):
    """One epoch of one process: a restarted worker has another epoch and is another peer.

    Attributes:
      role: role of the process.
      name: name in the fleet, such as `decode-0`.
      epoch: random bits drawn when the process starts, plus one for each further epoch.
    """

    role: Role
    name: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.name}@{shown_epoch(self.epoch)}"

    def identity(self) -> bytes:
        """Return the peer's name on links: two epochs never share a name."""
        return f"{self.role}:{self.name}:{self.epoch:016x}".encode()

    def is_process_of(self, earlier: PeerId) -> bool:
        """Return whether this is the process of an earlier epoch, in that epoch or a later one."""
        return self.epoch - earlier.epoch in range(LIVES)


def shown_identity(identity: bytes) -> str:
    """Return the peer's name for logs and messages. Identities that are not a peer's, which any
    program may send, are shown in hexadecimal."""
    found = _IDENTITY.fullmatch(identity)
    if found is None:
        return identity.hex()
    return f"{found[1].decode()}@{shown_epoch(int(found[2], 16))}"


def shown_epoch(epoch: int) -> str:
    """Return a digest of the epoch for logs and audits; only peers may see the epoch itself."""
    return blake2b(epoch.to_bytes(8, "big"), digest_size=8).hexdigest()


def new_request_id() -> bytes:
    """Return 128 random bits."""
    return secrets.token_bytes(REQUEST_ID_BYTES)


def new_secret() -> bytes:
    """Return 256 random bits to derive keys from."""
    return secrets.token_bytes(SECRET_BYTES)


def new_epoch() -> int:
    """Return 63 random bits, never 0. Further epochs of the process count up from there."""
    return secrets.randbits(63) or 1
