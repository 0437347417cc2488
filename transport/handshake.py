"""The handshake: check a HELLO for compatible roles, models and protocol versions, and answer it.

No I/O. A refusal is a GOODBYE with a reason that operators can act on.
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
"""Pattern of a fingerprint that starts with a compute digest."""
_WITHOUT_MODEL: Final = (Role.SERVER, Role.OPERATOR)


def make_hello(me: PeerId, fingerprint: str = "", ring: SharedRing | None = None) -> Hello:
    """Return our HELLO. Servers and operators compute nothing and have no fingerprint."""
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
    """Return the bound side's answer.

    Args:
      hello: the frame received.
      me: this process.
      expected: roles that may connect here.
      fingerprint: fingerprint of the model loaded here.
      capacity: for the WELCOME.
      kv_address: where this process receives KV; for the WELCOME.
      labels: labels of the worker; for the WELCOME.
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
    """Return a GOODBYE if the connecting side cannot work with the peer that answered, else None.

    Args:
      welcome: the frame received.
      me: this process.
      expected: role of the peer that should be bound there.
      fingerprint: fingerprint of our model; empty in a server, which works with any.
    """
    peer = welcome.peer.peer_id
    if peer.role is not expected:
        return goodbye(f"{me} connected to {peer}, a {peer.role}; expected a {expected} there")
    if agree_version(welcome.version, welcome.version) is None:
        return goodbye(_versions_apart(peer, welcome.version, welcome.version, me))
    if fingerprint and _are_apart(welcome.fingerprint, fingerprint):
        return goodbye(_models_apart(peer, welcome.fingerprint, me, fingerprint))
    return None


def versioned(fingerprint: str, compute_digest: str) -> str:
    """Return a fingerprint prefixed with a compute digest, or as it is for a model outside the
    store.

    Args:
      fingerprint: fingerprint of everything that a worker computes with.
      compute_digest: sha256:… of the model's version; it covers the tokenizer too.
    """
    return f"{compute_digest}/{fingerprint}" if compute_digest else fingerprint


def version_of(fingerprint: str) -> str:
    """Return the compute digest in a fingerprint; empty if there is none."""
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
    """Return a GOODBYE if a server cannot use a worker for a model, else None.

    Args:
      welcome: the WELCOME of the worker.
      me: the server.
      model: its name, for the reason.
      compute_digest: compute digest of its version; empty for a directory outside the store.
      takes_unversioned: accept a side without a version. True where one model is served: during a
        rolling restart a worker may be of a release that sent no version.
      adapters: possible endings of the worker's fingerprint, one per set of adapters; empty if the
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
        f"{welcome.peer.peer_id} has {theirs or 'a model outside the store'}, but {me} uses it "
        f"as a worker of {model}, which is {compute_digest or 'outside the store'}: the addresses "
        "of two models are mixed up, or the worker was started with another version"
    )


def _are_apart(theirs: str, ours: str) -> bool:
    """Return whether two workers' KV is incompatible. Their adapters may differ, as they do while a
    fleet loads one: a worker refuses requests for an adapter that it lacks."""
    return without_mark(theirs) != without_mark(ours)


def agree_version(their_oldest: int, their_newest: int) -> int | None:
    """Return the newest version that both sides support, or None."""
    version = min(their_newest, PROTOCOL_VERSION)
    return version if version >= max(their_oldest, OLDEST_PROTOCOL_VERSION) else None


def goodbye(reason: str, *, is_farewell: bool = False) -> Goodbye:
    """Return a GOODBYE with a reason that fits on the wire."""
    return Goodbye(reason[:MAX_TEXT], is_farewell)


def _versions_apart(peer: PeerId, oldest: int, newest: int, me: PeerId) -> str:
    return (
        f"{peer} speaks protocol versions {oldest} to {newest}, {me} {OLDEST_PROTOCOL_VERSION} to "
        f"{PROTOCOL_VERSION}: upgrade the older by one release at a time"
    )


def _models_apart(peer: PeerId, theirs: str, me: PeerId, ours: str) -> str:
    return (
        f"{peer} has model {theirs or '(none)'} and {me} has {ours}: their KV is incompatible; "
        "start both with the same model directory, dtype, weights, block size and backend"
    )
