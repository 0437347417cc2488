"""Bounds and deadlines of the links between server and workers, each beside its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from ..units import MIB, MILLISECONDS, SECONDS
from .limits import Count, Positive, require


class MemorySharing(StrEnum):
    """Whether decode workers read KV where prefill has put it, instead of out of a socket.

    `auto`: wherever decode finds prefill's memory, which says that both see one host and belong to
    one user; everywhere else bytes travel. `on`: only there; a process that cannot is no peer.
    `off`: bytes travel always. Either side's word counts.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class WireConfig:
    """Ways to ship that are chosen, not needed."""

    share_memory: MemorySharing = MemorySharing.AUTO
    """Two to three times as fast as a socket, for half the CPU, and decided anew for each pair:
    what decode cannot open it is sent."""
    plaintext: bool = False
    """KV over tcp goes unencrypted, over connections without keys; CURVE moves 0.6 to 0.8 GB/s. For
    a trusted network: each chunk has a MAC by a key of its attempt, so nothing forged enters a
    pool, but KV can be read on its way. Both sides of a link must agree."""


MAX_LENDERS = 256
"""Workers of one machine, far above what its cores can use: each looks at all others before each
of its steps."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Deadlines and bounds of the protocol between processes (docs/protocol.md)."""

    heartbeat_interval_s: Positive = 0.5 * SECONDS
    """Both ways. Three fit into `peer_timeout_s`, so one lost or late frame is no death."""
    load_report_interval_s: Positive = 20 * MILLISECONDS
    """When leases end their worker sends its load in the turn after that, but not sooner than
    this after its last heartbeat. A cancel is promised within 100 ms and takes 40 ms at p99: this
    leaves time to see it. A thousand ends in one turn are one report."""
    peer_timeout_s: float = 1.5 * SECONDS
    """Silence after which a peer counts as dead."""
    progress_timeout_s: float = 1.5 * SECONDS
    """A peer that answers, has work and finishes no device step for this long is wedged, and counts
    as dead; its own `/health/ready` says so too. Ten steps of the length that it announced are
    waited for in any case. Raise it where one step of a large model takes longer."""
    lease_ttl_s: float = 2.0 * SECONDS
    """A lease that its server has not renewed for this long is released. Above `peer_timeout_s`, so
    that the server gives up first."""
    tombstone_s: float = 30.0 * SECONDS
    """How long an ended attempt is remembered: longer than any frame can be under way."""
    max_tombstones: int = 100_000
    """About 15 MiB; at the bound the oldest is forgotten first."""
    sweep_interval_s: float = 50 * MILLISECONDS
    """How often expired leases, deadlines and stalled clients are looked for."""
    hello_timeout_s: float = 5.0 * SECONDS
    """A peer that connects and does not say HELLO within this time is forgotten."""
    kv_chunk_bytes: Count = 1 * MIB
    """Payload per KV frame, rounded down to whole blocks (at least one): 1 MiB frames moved most
    bytes per second on tcp and ipc."""
    kv_window_bytes: Count = 16 * MIB
    """Bytes a sender may have under way to one decode worker: 16 chunks hide the round trip."""
    kv_ring_bytes: int = 64 * MIB
    """Host memory for KV that is computed but not yet acknowledged; full means prefill stops
    taking work."""
    kv_stall_s: float = 2.0 * SECONDS
    """A transfer that gains no credit for this long has lost its receiver."""
    kv_retry_s: Positive = 1.0 * SECONDS
    """A chunk or manifest that is unanswered for this long is sent again: half of `kv_stall_s`, so
    that one lost frame does not end a transfer. Far above a round trip, so that a slow receiver is
    not sent everything twice."""
    kv_idle_s: float = 60.0 * SECONDS
    """A kv link that carried nothing for this long is closed; the next transfer dials again."""
    max_chunk_resends: int = 2
    """A chunk with a wrong digest more often ends the attempt: the path is broken."""
    max_peers: int = 1024
    """Processes that one worker knows at once; at the bound a new HELLO is answered by GOODBYE."""
    max_operators: int = 16
    """Commands that watch one worker at once: people and supervisors, each for one drain."""
    control_hwm: int = 10_000
    """Frames per control pipe; a peer at this mark is busy and counts as failing. Frames are small
    (a TOKENS frame of 256 rows is 12 KiB)."""
    kv_hwm: int = 256
    """Frames per KV pipe; the byte window is reached first, this is the second fence."""
    dead_host_s: Annotated[float, Meta(ge=1)] = 3.0 * SECONDS
    """A TCP connection to a host that answers nothing for so long is closed by the kernel, which
    gives back what it holds. The protocol's heartbeats find a dead peer before."""
    farewell_s: float = 2.0 * SECONDS
    """A worker that leaves waits this long for its servers to have heard it, which takes a busy
    machine a while; one that does not answer finds out by silence, as with a worker that died.
    Below what a supervisor waits before it kills."""
    handshake_s: Positive = 5.0 * SECONDS
    """A connection with a longer handshake is closed: a stranger cannot hold one for nothing.
    The two round trips take milliseconds."""
    redial_s: Positive = 2.0 * SECONDS
    """A HELLO without an answer for this long is said again over a new connection: the old one may
    lead nowhere, although its peer lives. Four heartbeats, so that a busy worker is not redialled;
    doubled each time, up to `max_redial_s`."""
    max_redial_s: float = 8.0 * SECONDS
    """After its keys or workers have been mended a fleet is whole again within this time."""
    linger_s: float = 200 * MILLISECONDS
    """A closed link may still hand what was sent to the kernel for this long, so that last words
    (ENDED, GOODBYE) arrive; a peer that reads nothing holds up the end of a process no longer."""
    local_reconnect_s: Annotated[float, Meta(ge=0.001)] = 30 * MILLISECONDS
    """Between two attempts to reach a process of this host that is not there, at random up to twice
    as long: how long a worker that has just begun to listen waits to be found. An attempt takes
    some 40 µs of a thread of its own, 0.1 % of a core for each worker that is away."""
    max_control_frame_bytes: int = 16 * MIB
    """The largest control frame is a PREFILL of a 1M-token prompt: 4 MiB of ids and some."""
    max_kv_frame_bytes: int = 64 * MIB
    """One block of a very large model still fits."""
    wire: WireConfig = field(default_factory=WireConfig)
    """How KV travels."""

    def __post_init__(self) -> None:
        heartbeat_s = self.heartbeat_interval_s
        for name, is_allowed, allowed in (
            (
                "load_report_interval_s",
                self.load_report_interval_s <= heartbeat_s,
                f"> 0 and <= heartbeat_interval_s ({heartbeat_s})",
            ),
            (
                "peer_timeout_s",
                self.peer_timeout_s > 2 * heartbeat_s,
                f"> 2 x heartbeat_interval_s ({2 * heartbeat_s})",
            ),
            (
                "kv_retry_s",
                self.kv_retry_s < self.kv_stall_s,
                f"> 0 and < kv_stall_s ({self.kv_stall_s})",
            ),
            (
                "lease_ttl_s",
                self.lease_ttl_s > self.peer_timeout_s,
                f"> peer_timeout_s ({self.peer_timeout_s})",
            ),
            (
                "redial_s",
                self.redial_s <= self.max_redial_s,
                f"> 0 and <= max_redial_s ({self.max_redial_s})",
            ),
            (
                "local_reconnect_s",
                self.local_reconnect_s <= heartbeat_s,
                f">= 0.001 and <= heartbeat_interval_s ({heartbeat_s})",
            ),
            (
                "kv_ring_bytes",
                self.kv_ring_bytes >= self.kv_chunk_bytes,
                f">= kv_chunk_bytes ({self.kv_chunk_bytes})",
            ),
        ):
            require(is_allowed, name, getattr(self, name), allowed)
