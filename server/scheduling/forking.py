"""Several completions of one prompt: which of them may share what another one's attempt computes.

A later completion goes to the decode worker of the first, and takes of it little more than a row.
Whether decode still has the prompt only decode knows, and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .routing import Pair, Route, Why, has_room

if TYPE_CHECKING:
    from .request import Attempt, Request
    from .routing import Need


def fork_route(sequence: Request, now: float) -> Route | None:
    """Return the way to the prompt that a sequence can share, or None if there is none now.

    What may be what workers fail by goes alone: a fork and its origin would be struck together.
    """
    origin = None if sequence.origin is None else sequence.origin.attempt
    if origin is None or sequence.faults or sequence.poison.is_of_prompt:
        return None
    decode = origin.pair.decode
    if not decode.is_usable or sequence.fingerprint not in ("", decode.fingerprint):
        return None
    route = Route(Pair(decode, decode), 1, (Why.FORK, Why.FORK), origin.key)
    need = need_on(route, sequence.need)
    if sequence.poison.isolated or not has_room(decode, need, now):
        return None
    return route


def need_on(route: Route, need: Need) -> Need:
    """Return what a sequence takes of the workers of a route. A fork takes its own blocks only, and
    has the prompt's last token to be computed."""
    capacity = route.pair.decode.capacity
    assert capacity is not None, "an attempt goes to welcomed workers only"
    if route.fork_of is None:
        return need
    num_shared = (need.prompt_tokens - 1) // capacity.block_size
    own_tokens = need.kv_tokens - num_shared * capacity.block_size
    return need._replace(prompt_tokens=1, kv_tokens=own_tokens, chain=None)


def note_no_fork(sequence: Request, attempt: Attempt) -> None:
    """Take in that decode does not have the prompt that an attempt was to share. Unless its origin
    has moved on meanwhile, nothing will change that."""
    origin = None if sequence.origin is None else sequence.origin.attempt
    if origin is None or origin.key == attempt.fork_of:
        sequence.origin = None
