"""Who is who: requests, attempts, processes. Ids are random and never reused.

Knows how ids are made and shown; knows nothing of what they name.
"""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple

REQUEST_ID_BYTES = 16
SECRET_BYTES = 32


class Role(StrEnum):
    """What a process is in the fleet."""

    SERVER = "server"
    PREFILL = "prefill"
    DECODE = "decode"
    CONTROL = "control"
    """Decides which models of a fleet are resident; has no links to workers."""
    OPERATOR = "operator"
    """A command of a person or a supervisor: asks workers to drain, and has no requests."""


class AttemptKey(NamedTuple):
    """One try at one request. Death of a worker, preemption or drain begins the next attempt.

    Attributes:
      request_id: 16 random bytes.
      attempt: 0 for the first.
    """

    request_id: bytes
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id.hex()}/{self.attempt}"


LIVES: Final = 256
"""Of one process, from one epoch that a peer knows to the next one that it hears of."""
_IDENTITY: Final = re.compile(rb"[a-z]+:([!-~]{1,255}):([0-9a-f]{16})")
"""What `PeerId.identity` returns."""


class PeerId(NamedTuple):
    """One life of one process: a restarted worker has another epoch and is another peer.

    Attributes:
      role: what it is.
      name: its name in the fleet, such as `decode-0`.
      epoch: random bits drawn at the start of its process, and one more with each further life.
    """

    role: Role
    name: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.name}@{shown_epoch(self.epoch)}"

    def identity(self) -> bytes:
        """Return what a bound side calls this peer: two lives never share a name."""
        return f"{self.role}:{self.name}:{self.epoch:016x}".encode()

    def is_process_of(self, earlier: PeerId) -> bool:
        """Return whether this is the process of an earlier life, in that life or in a later one."""
        return self.epoch - earlier.epoch in range(LIVES)


def shown_identity(identity: bytes) -> str:
    """Return how logs and messages call the peer of an identity; one that is no peer's, as any
    program may send it, in hexadecimal digits."""
    found = _IDENTITY.fullmatch(identity)
    if found is None:
        return identity.hex()
    return f"{found[1].decode()}@{shown_epoch(int(found[2], 16))}"


def shown_epoch(epoch: int) -> str:
    """Return what logs and audits tell a life apart by: a digest, for the epoch itself is told to
    the peers of a process only."""
    return blake2b(epoch.to_bytes(8, "big"), digest_size=8).hexdigest()


def new_request_id() -> bytes:
    """Return 128 random bits."""
    return secrets.token_bytes(REQUEST_ID_BYTES)


def new_secret() -> bytes:
    """Return 256 random bits, of which keys are made."""
    return secrets.token_bytes(SECRET_BYTES)


def new_epoch() -> int:
    """Return 63 random bits, never 0. Further lives of the process count up from there."""
    return secrets.randbits(63) or 1
