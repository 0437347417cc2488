"""Predicates for the rules of the fault matrix's proxy: which frames a rule applies to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.frames import KvChunk, Prefill, ServerHeartbeat, Tokens

from .rules import Fate, Link, Rule, Way, with_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.frames import AnyFrame
    from triolet.ids import AttemptKey

    from .rules import Wants


def frames(*kinds: type) -> Wants:
    """Return a predicate for these kinds of frames, on any link."""

    def wants(link: Link, way: Way, frame: AnyFrame) -> bool:
        return isinstance(frame, kinds)

    return wants


def first_of_each(*kinds: type) -> Wants:
    """Return a predicate for the first frame of each of these kinds, per link and direction."""
    seen: set[tuple[Link, Way, type]] = set()

    def wants(link: Link, way: Way, frame: AnyFrame) -> bool:
        which = (link, way, type(frame))
        if not isinstance(frame, kinds) or which in seen:
            return False
        seen.add(which)
        return True

    return wants


def hold_prefills() -> tuple[Rule, Rule]:
    """Hold every PREFILL, so that decode has a reservation and prefill knows nothing. A second rule
    removes held attempts from heartbeats: prefill would answer that it does not know them, and half
    a second later they would be retried."""
    kept: set[tuple[str, AttemptKey]] = set()

    def is_prefill(link: Link, way: Way, frame: AnyFrame) -> bool:
        if isinstance(frame, Prefill):
            kept.add((link.worker, frame.key))
        return isinstance(frame, Prefill)

    def names_kept(link: Link, way: Way, frame: AnyFrame) -> bool:
        live = frame.live if isinstance(frame, ServerHeartbeat) else ()
        return any((link.worker, row.key) in kept for row in live)

    def without_kept(frame: AnyFrame) -> AnyFrame:
        assert isinstance(frame, ServerHeartbeat)
        keys = {key for _, key in kept}
        return with_fields(frame, live=tuple(row for row in frame.live if row.key not in keys))

    rewrite = Rule(Fate.REWRITE, names_kept, rewrite=without_kept)
    return Rule(Fate.HOLD, is_prefill), rewrite


def hold_chunk(index: int) -> Rule:
    """Hold every chunk with this number."""

    def wants(link: Link, way: Way, frame: AnyFrame) -> bool:
        return isinstance(frame, KvChunk) and frame.index == index

    return Rule(Fate.HOLD, wants)


def payloads(*kinds: type) -> Wants:
    """Return a predicate for frames of these kinds with a payload: KV in shared memory is not on
    the wire."""

    def wants(link: Link, way: Way, frame: AnyFrame) -> bool:
        is_shared = isinstance(frame, KvChunk) and frame.shared is not None
        return isinstance(frame, kinds) and not is_shared

    return wants


def hold_last_tokens(num_tokens: int) -> Rule:
    """Hold the row of the last position, and the tokens that follow on that link.

    Decode reports that it is done while the server still misses tokens.
    """
    late: set[Link] = set()

    def wants(link: Link, way: Way, frame: AnyFrame) -> bool:
        if not isinstance(frame, Tokens):
            return False
        if any(row.position == num_tokens - 1 for row in frame.rows):
            late.add(link)
        return link in late

    return Rule(Fate.HOLD, wants)


def between(one: str, other: str) -> Callable[[Link], bool]:
    """Return a predicate for the links between two processes, in either direction."""
    return lambda link: {link.client, link.worker} == {one, other}
