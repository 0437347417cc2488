"""What an ENDED from a worker means for the sequence: the reason decides, by table.

Knows reasons and roles; knows no sequences. A reason that is not here is one that the server gave
itself, and its echo means nothing any more.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from transport.frames import EndReason


class Verdict(Enum):
    """What to do."""

    COMPLETE = auto()  # decode: all tokens exist; prefill: decode has the KV
    RETRY = auto()  # a failure: the next attempt counts
    MOVE = auto()  # nobody's fault: the next attempt does not count
    REFUSE = auto()  # the request's own fault: it would be the same anywhere
    CONDEMN = auto()  # the same, and its grammar is refused for a while
    IGNORE = auto()


OF_DECODE: Final[dict[EndReason, Verdict]] = {
    EndReason.STOP: Verdict.COMPLETE,
    EndReason.LENGTH: Verdict.COMPLETE,
    EndReason.PREEMPTED: Verdict.MOVE,
    EndReason.FORSAKEN: Verdict.MOVE,
    EndReason.DRAIN: Verdict.MOVE,
    EndReason.PEER_LOST: Verdict.RETRY,
    EndReason.LEASE_EXPIRED: Verdict.RETRY,
    EndReason.UNKNOWN: Verdict.RETRY,
    EndReason.STUCK: Verdict.REFUSE,
    EndReason.TOO_COSTLY: Verdict.CONDEMN,
    EndReason.ERROR: Verdict.RETRY,
}
"""DEADLINE is missing on purpose: the server's own clock says when a request is too late."""

OF_PREFILL: Final[dict[EndReason, Verdict]] = {
    EndReason.HANDED_OVER: Verdict.COMPLETE,
    EndReason.DRAIN: Verdict.MOVE,
    EndReason.PREEMPTED: Verdict.MOVE,
    EndReason.PEER_LOST: Verdict.RETRY,
    EndReason.LEASE_EXPIRED: Verdict.RETRY,
    EndReason.UNKNOWN: Verdict.RETRY,
    EndReason.STUCK: Verdict.REFUSE,
    EndReason.TOO_COSTLY: Verdict.CONDEMN,
    EndReason.ERROR: Verdict.RETRY,
}
"""Failures count only until decode has the KV. UNWANTED is missing on purpose: decode has ended the
attempt, and its own ENDED is on the way with the reason."""
