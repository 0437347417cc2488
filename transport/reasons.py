"""The words for why an attempt ended or never began. They travel as they are written here; what a
server makes of each is in docs/protocol.md and server/fleet/verdicts.py.
"""

from __future__ import annotations

from enum import StrEnum


class EndReason(StrEnum):
    """Why an attempt ended. The first three are the model's own ends, all others are ours."""

    STOP = "stop"  # end-of-sequence or stop token
    LENGTH = "length"
    STOP_STRING = "stop_string"
    CANCEL = "cancel"  # the client left
    STALLED = "stalled"  # the client stopped reading
    DEADLINE = "deadline"
    DRAIN = "drain"
    PREEMPTED = "preempted"  # blocks ran out; the server begins a new attempt
    FORSAKEN = "forsaken"  # decode only: the attempt whose prompt it was to share ended first
    SUPERSEDED = "superseded"  # a newer attempt of the same request exists
    LEASE_EXPIRED = "lease_expired"  # its server fell silent or no longer names it
    PEER_LOST = "peer_lost"  # the other worker of the pair
    HANDED_OVER = "handed_over"  # prefill only: decode has all of the KV; a success
    EMBEDDED = "embedded"  # prefill only: the vector was sent; a success
    UNWANTED = "unwanted"  # prefill only: decode has ended it, and says itself why
    STUCK = "stuck"  # its grammar leaves no token
    TOO_COSTLY = "too_costly"  # its grammar takes too long to follow
    UNKNOWN = "unknown"  # the worker has no such attempt
    ERROR = "error"


class RefuseReason(StrEnum):
    """Why decode granted no lease."""

    NO_BLOCKS = "no_blocks"
    NO_ROWS = "no_rows"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    ENDED = "ended"  # a tombstone: the END overtook its RESERVE
    NO_FORK = "no_fork"  # the attempt whose prompt it was to share is not here
