"""Bounds and deadlines of the links between servers and workers, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from ..units import MIB, MILLISECONDS, SECONDS
from .limits import Count, Positive, require


class MemorySharing(StrEnum):
    """Whether decode workers read KV in prefill's memory instead of receiving it over a socket.

    `auto`: wherever decode can open prefill's memory, that is on one host under one user; elsewhere
    bytes are sent. `on`: only there; a process that cannot is refused as a peer. `off`: bytes are
    always sent. The stricter setting of the two sides applies.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class WireConfig:
    """Optional ways to send KV."""

    share_memory: MemorySharing = MemorySharing.AUTO
    """Two to three times as fast as a socket, for half the CPU. Decided for each pair: if decode
    cannot open the memory, bytes are sent."""
    plaintext: bool = False
    """Send KV over tcp without encryption and without keys; CURVE moves 0.6 to 0.8 GB/s. For a
    trusted network: each chunk has a MAC by a key of its attempt, so nothing forged enters a pool,
    but others can read KV on its way. Both sides of a link must have the same setting."""


MAX_LENDERS = 256
"""Workers of one machine, far more than its cores can use: each checks all others before each
step."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Deadlines and bounds of the protocol between processes (docs/protocol.md)."""

    heartbeat_interval_s: Positive = 0.5 * SECONDS
    """In both directions. Three fit into `peer_timeout_s`, so one lost or late frame is
    harmless."""
    load_report_interval_s: Positive = 20 * MILLISECONDS
    """When leases end, their worker sends its load in the next turn, but not sooner than this after
    its last heartbeat. A cancel must take at most 100 ms and takes 40 ms at p99: this leaves time
    to see it. A thousand ends in one turn make one report."""
    peer_timeout_s: float = 1.5 * SECONDS
    """A peer that is silent for this long counts as dead."""
    progress_timeout_s: float = 1.5 * SECONDS
    """A peer that answers and has work but finishes no device step for this long is stuck and
    counts as dead; its own `/health/ready` fails too. At least ten steps of its announced length
    are allowed. Raise it if one step of a large model takes longer."""
    lease_ttl_s: float = 2.0 * SECONDS
    """A lease that its server has not renewed for this long is released. Longer than
    `peer_timeout_s`, so that the server gives up first."""
    tombstone_s: float = 30.0 * SECONDS
    """How long an ended attempt is remembered: longer than any frame can be under way."""
    max_tombstones: int = 100_000
    """About 15 MiB; beyond this the oldest is forgotten."""
    sweep_interval_s: float = 50 * MILLISECONDS
    """Interval at which expired leases, deadlines and stalled clients are checked."""
    hello_timeout_s: float = 5.0 * SECONDS
    """A peer that connects and sends no HELLO for this long is forgotten."""
    kv_chunk_bytes: Count = 1 * MIB
    """Payload per KV frame, rounded down to whole blocks (at least one): 1 MiB frames had the
    highest throughput over tcp and ipc."""
    kv_window_bytes: Count = 16 * MIB
    """Bytes under way to one decode worker: 16 chunks hide the round trip."""
    kv_ring_bytes: int = 64 * MIB
    """Host memory for computed KV that is not acknowledged yet; when it is full, prefill takes no
    more work."""
    kv_stall_s: float = 2.0 * SECONDS
    """A transfer that gets no credit for this long has lost its receiver."""
    kv_retry_s: Positive = 1.0 * SECONDS
    """A chunk or manifest without an answer for this long is sent again: half of `kv_stall_s`, so
    that one lost frame does not end a transfer. Far above a round trip, so that a slow receiver
    does not get everything twice."""
    kv_idle_s: float = 60.0 * SECONDS
    """A KV link without traffic for this long is closed; the next transfer connects again."""
    max_chunk_resends: int = 2
    """Resends of a chunk with a wrong digest. After that the attempt ends: the path is broken."""
    max_peers: int = 1024
    """Processes that one worker knows at once; beyond this a new HELLO is answered by GOODBYE."""
    max_operators: int = 16
    """Commands that watch one worker at once: people and supervisors, each for one drain."""
    control_hwm: int = 10_000
    """Frames per control pipe; a peer at this limit is busy and counts as failing. Frames are small
    (a TOKENS frame of 256 rows is 12 KiB)."""
    kv_hwm: int = 256
    """Frames per KV pipe. The byte window is reached first; this is the second barrier."""
    dead_host_s: Annotated[float, Meta(ge=1)] = 3.0 * SECONDS
    """The kernel closes a TCP connection to a host that does not answer for this long, and frees
    its resources. The protocol's heartbeats detect a dead peer earlier."""
    farewell_s: float = 2.0 * SECONDS
    """How long a leaving worker waits until its servers have confirmed it, which takes a while on a
    busy machine; the others notice by its silence, as after a crash. Shorter than a supervisor
    waits before it kills."""
    handshake_s: Positive = 5.0 * SECONDS
    """A connection with a longer handshake is closed, so that a stranger cannot hold one for free.
    The two round trips take milliseconds."""
    redial_s: Positive = 2.0 * SECONDS
    """A HELLO without an answer for this long is sent again over a new connection: the old one may
    be broken although the peer is alive. Four heartbeats, so that a busy worker is not redialled;
    doubled each time, up to `max_redial_s`."""
    max_redial_s: float = 8.0 * SECONDS
    """A fleet is whole again within this time after its keys or workers were repaired."""
    linger_s: float = 200 * MILLISECONDS
    """How long a closed link may still hand sent frames to the kernel, so that the last ones
    (ENDED, GOODBYE) arrive; a peer that does not read delays the end of a process by no more than
    this."""
    local_reconnect_s: Annotated[float, Meta(ge=0.001)] = 30 * MILLISECONDS
    """Interval between attempts to reach a missing process of this host, at random up to twice as
    long:
    the time until a worker that has just started is found. An attempt takes about 40 µs of a
    thread,
    0.1 % of a core per missing worker."""
    max_control_frame_bytes: int = 16 * MIB
    """The largest control frame is a PREFILL of a 1M-token prompt: a little over 4 MiB."""
    max_kv_frame_bytes: int = 64 * MIB
    """Holds one block of a very large model."""
    wire: WireConfig = field(default_factory=WireConfig)
    """How KV is sent."""

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
