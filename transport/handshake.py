"""HELLO and its answer: may these two processes work together, and in which version.

Decides, sends nothing. Every refusal is a GOODBYE whose reason an operator can act on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from triolet.adapter_keys import mark_of, without_mark
from triolet.ids import Role

from .frames import (
    MAX_TEXT,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Capacity,
    Goodbye,
    Hello,
    Peer,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from triolet.ids import PeerId

    from .frames import SharedRing

_VERSIONED: Final = re.compile(r"(sha256:[0-9a-f]{64})/.*", re.DOTALL)
"""A fingerprint that names a compute digest, and behind it what a worker computes with."""
_WITHOUT_MODEL: Final = (Role.SERVER, Role.OPERATOR)


def make_hello(me: PeerId, fingerprint: str = "", ring: SharedRing | None = None) -> Hello:
    """Return our HELLO; servers and operators compute nothing and have no fingerprint."""
    return Hello(Peer.of(me), PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION, fingerprint, ring)


def answer_hello(
    hello: Hello,
    *,
    me: PeerId,
    expected: Collection[Role],
    fingerprint: str,
    capacity: Capacity,
    kv_address: str = "",
    labels: Mapping[str, str] | None = None,
) -> Welcome | Goodbye:
    """Return what the bound side answers.

    Args:
      hello: what came.
      me: who is asked.
      expected: the roles that may connect here.
      fingerprint: of the model that is loaded here.
      capacity: goes into the WELCOME.
      kv_address: where KV is taken; goes into the WELCOME.
      labels: of the worker; go into the WELCOME.
    """
    peer = hello.peer.peer_id
    if peer.role not in expected:
        allowed = ", ".join(sorted(expected))
        return goodbye(f"a {peer.role} connected to {me}, where only {allowed} may")
    version = agree_version(hello.oldest_version, hello.version)
    if version is None:
        return goodbye(_versions_apart(peer, hello.oldest_version, hello.version, me))
    if peer.role not in _WITHOUT_MODEL and _are_apart(hello.fingerprint, fingerprint):
        return goodbye(_models_apart(peer, hello.fingerprint, me, fingerprint))
    told = dict(labels or {})
    return Welcome(Peer.of(me), version, fingerprint, capacity, kv_address, labels=told)


def check_welcome(
    welcome: Welcome, *, me: PeerId, expected: Role, fingerprint: str = ""
) -> Goodbye | None:
    """Return why the connecting side cannot work with who answered, or None if it can.

    Args:
      welcome: what came.
      me: who connected.
      expected: the role that should be bound there.
      fingerprint: of our own model; empty in a server, which works with any.
    """
    peer = welcome.peer.peer_id
    if peer.role is not expected:
        return goodbye(f"{me} connected to {peer}, a {peer.role}; a {expected} was expected there")
    if agree_version(welcome.version, welcome.version) is None:
        return goodbye(_versions_apart(peer, welcome.version, welcome.version, me))
    if fingerprint and _are_apart(welcome.fingerprint, fingerprint):
        return goodbye(_models_apart(peer, welcome.fingerprint, me, fingerprint))
    return None


def versioned(fingerprint: str, compute_digest: str) -> str:
    """Return a fingerprint that begins with a compute digest; as it is for a model in no store.

    Args:
      fingerprint: of what a worker computes with.
      compute_digest: sha256:… of the model's version, which pins its tokenizer too.
    """
    return f"{compute_digest}/{fingerprint}" if compute_digest else fingerprint


def version_of(fingerprint: str) -> str:
    """Return the compute digest that a fingerprint names; empty if it names none."""
    found = _VERSIONED.fullmatch(fingerprint)
    return found[1] if found else ""


def check_version(
    welcome: Welcome,
    *,
    me: PeerId,
    model: str,
    compute_digest: str,
    takes_unversioned: bool,
    adapters: Collection[str] = ("",),
) -> Goodbye | None:
    """Return why a server cannot use a worker for one of its models, or None if it can.

    Args:
      welcome: of the worker.
      me: the server.
      model: its name, for the reason.
      compute_digest: of its version; empty for a directory that is in no store.
      takes_unversioned: whether no version on one side goes with any on the other. So it is where
        one model is served: in a rolling restart a worker may be of a release that named none.
      adapters: how the fingerprint of a worker may end, by its set of adapters; nothing where the
        model has none.
    """
    if mark_of(welcome.fingerprint) not in adapters:
        return goodbye(
            f"{welcome.peer.peer_id} has other LoRA adapters than {me} offers for {model}: start "
            "workers and servers with the same adapters"
        )
    theirs = version_of(welcome.fingerprint)
    if theirs == compute_digest or (takes_unversioned and not (theirs and compute_digest)):
        return None
    return goodbye(
        f"{welcome.peer.peer_id} has {theirs or 'a model that is in no store'} and {me} reaches it "
        f"as a worker of {model}, which is {compute_digest or 'in no store'}: the addresses of two "
        "models are mixed up, or the worker was started with another version"
    )


def _are_apart(theirs: str, ours: str) -> bool:
    """Return whether KV of one worker means nothing to another. Their adapters may differ, as they
    do while a fleet loads one: a worker refuses what names an adapter that it lacks."""
    return without_mark(theirs) != without_mark(ours)


def agree_version(their_oldest: int, their_newest: int) -> int | None:
    """Return the newest version that both sides speak, or None."""
    version = min(their_newest, PROTOCOL_VERSION)
    return version if version >= max(their_oldest, OLDEST_PROTOCOL_VERSION) else None


def goodbye(reason: str, *, is_farewell: bool = False) -> Goodbye:
    """Return a GOODBYE whose reason fits on the wire."""
    return Goodbye(reason[:MAX_TEXT], is_farewell)


def _versions_apart(peer: PeerId, oldest: int, newest: int, me: PeerId) -> str:
    return (
        f"{peer} speaks protocol versions {oldest} to {newest}, {me} {OLDEST_PROTOCOL_VERSION} to "
        f"{PROTOCOL_VERSION}: upgrade the older by one release at a time"
    )


def _models_apart(peer: PeerId, theirs: str, me: PeerId, ours: str) -> str:
    return (
        f"{peer} has model {theirs or '(none)'} and {me} has {ours}: KV of one means nothing to "
        "the other; start both with the same model directory, dtype, weights, block size, backend"
    )
