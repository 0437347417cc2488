"""Events of the audit log, and their encoding as canonical JSON lines."""

from __future__ import annotations

import os
import pwd
import re
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Final, TypeAlias

import msgspec

from triolet.errors import AuditLogError

from .merkle import leaf_hash

MAX_ENTRY_BYTES: Final = 16 * 1024
"""Limit of a line. All fields at their longest need less, unless every character is escaped."""
MAX_COUNTS: Final = 16
_LINE: Final = re.compile(rb'\{"entry":(.*),"leaf":"(.{64})"\}', re.DOTALL)
_HEX: Final = re.compile(rb"[0-9a-f]{64}")

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Subject: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Counts: TypeAlias = Annotated[dict[Name, Count], msgspec.Meta(max_length=MAX_COUNTS)]


class Action(StrEnum):
    """Kinds of actions. docs/AUDIT.md explains each."""

    LOG_BEGIN = "log.begin"
    LOG_CUT = "log.cut"
    MODEL_IMPORT = "model.import"
    MODEL_TAG = "model.tag"
    MODEL_ALIAS = "model.alias"
    MODEL_REMOVE = "model.rm"
    MODEL_GC = "model.gc"
    MODEL_PUSH = "model.push"
    MODEL_PULL = "model.pull"
    MODEL_SIGN = "model.sign"
    MODEL_PROBE = "model.probe"
    MODEL_LOAD = "model.load"
    MODEL_SLEEP = "model.sleep"
    MODEL_UNLOAD = "model.unload"
    MODEL_ADD = "model.add"
    MODEL_DROP = "model.drop"
    MODEL_SWITCH = "model.switch"
    ROLLOUT_START = "rollout.start"
    ROLLOUT_STEP = "rollout.step"
    ROLLOUT_PAUSE = "rollout.pause"
    ROLLOUT_PROMOTE = "rollout.promote"
    ROLLOUT_ROLLBACK = "rollout.rollback"
    ADAPTER_LOAD = "adapter.load"
    ADAPTER_UNLOAD = "adapter.unload"
    MODEL_REQUIRE = "model.require"
    TENANT_ADD = "tenant.add"
    TENANT_ROTATE = "tenant.rotate"
    TENANT_DISABLE = "tenant.disable"
    TENANT_ENABLE = "tenant.enable"
    KEYS_MAKE = "keys.make"
    FLEET_UP = "fleet.up"
    FLEET_DOWN = "fleet.down"
    FLEET_RESTART = "fleet.restart"
    FLEET_SCALE = "fleet.scale"
    WORKER_DRAIN = "worker.drain"


class AuditOutcome(StrEnum):
    """Outcome of an action. BEGUN is written before the action, the others after it."""

    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One administrative event. Contains names, digests and counts, but no user data.

    Attributes:
      action: kind of action.
      subject: what it was done to: a tenant, a model, a worker or a path.
      actor: `user:NAME` of the operating system, or `key:NAME` of an API key.
      outcome: begun, done or failed.
      before: digest of the subject's state before, if it has one.
      after: digest of the subject's state afterwards.
      counts: figures, such as freed bytes.
      reason: why it failed (`why_failed`).
      request_id: id shared by all entries of an action.
    """

    action: Action
    subject: Subject
    actor: Name
    outcome: AuditOutcome = AuditOutcome.DONE
    before: Digest | None = None
    after: Digest | None = None
    counts: Counts | None = None
    reason: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    request_id: Name | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event in the log, with its index and time.

    Has the fields of `AuditEvent`, but `action` and `outcome` are plain text, because a log may
    contain actions of a later release. `time` is UTC, RFC 3339 with microseconds.
    """

    index: Annotated[int, msgspec.Meta(ge=0)]
    time: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")]
    action: Name
    subject: Subject
    actor: Name
    outcome: Name
    before: Digest | None = None
    after: Digest | None = None
    counts: Counts | None = None
    reason: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    request_id: Name | None = None


_ENCODER: Final = msgspec.json.Encoder(order="sorted")
_EVENTS: Final = msgspec.json.Decoder(AuditEvent)
_ENTRIES: Final = msgspec.json.Decoder(AuditEntry)


class AuditLineError(ValueError):
    """A line that is malformed or altered; the text says what is wrong."""


class AlteredLine(AuditLineError):
    """A line with content that does not match its hash.

    Attributes:
      leaf: the hash in the line.
    """

    def __init__(self, leaf: bytes) -> None:
        super().__init__("its content does not match its hash")
        self.leaf = leaf


def check_event(event: AuditEvent) -> None:
    """Check an event against the limits of the log.

    Raises:
      AuditLogError: a field is too long or malformed, or the event is too large.
    """
    try:
        content = _ENCODER.encode(event)
        _EVENTS.decode(content)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise AuditLogError(
            f"the audit log does not accept this event: {error}; nothing was recorded"
        ) from None
    # The index, time and hash need less than a kilobyte.
    if len(content) > MAX_ENTRY_BYTES - 1024:
        raise AuditLogError(
            f"the event has {len(content)} bytes; the audit log accepts at most "
            f"{MAX_ENTRY_BYTES - 1024}. Nothing was recorded: shorten its subject or counts"
        )


def encode_line(event: AuditEvent, index: int, time_text: str) -> tuple[bytes, bytes]:
    """Return the line of an event, without a newline, and its leaf hash."""
    content = _ENCODER.encode(
        AuditEntry(
            index=index,
            time=time_text,
            action=event.action.value,
            subject=event.subject,
            actor=event.actor,
            outcome=event.outcome.value,
            before=event.before,
            after=event.after,
            counts=event.counts,
            reason=event.reason,
            request_id=event.request_id,
        )
    )
    leaf = leaf_hash(content)
    return b'{"entry":%b,"leaf":"%b"}' % (content, leaf.hex().encode()), leaf


def split_line(line: bytes) -> tuple[bytes, bytes]:
    """Return the canonical JSON of a line's entry, which is hashed, and its leaf hash.

    Raises:
      AuditLineError: the line is malformed; an `AlteredLine` if only the hash differs.
    """
    found = _LINE.fullmatch(line) if len(line) <= MAX_ENTRY_BYTES else None
    if found is None:
        raise AuditLineError("it does not have the form of an entry")
    content, stated = found.groups()
    leaf = leaf_hash(content)
    if leaf.hex().encode() != stated:
        if not _HEX.fullmatch(stated):
            raise AuditLineError("its hash is not hexadecimal")
        raise AlteredLine(bytes.fromhex(stated.decode()))
    return content, leaf


def decode_entry(content: bytes) -> AuditEntry:
    """Decode an entry.

    Raises:
      AuditLineError: it is malformed.
    """
    try:
        return _ENTRIES.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AuditLineError(f"it is not an entry: {error}") from None


def time_text(seconds: float) -> str:
    """Format a time since the epoch as in entries and heads."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def digest(content: bytes) -> str:
    """Return the digest of a state for an event."""
    return f"sha256:{sha256(content).hexdigest()}"


def os_user() -> str:
    """Return the actor of a command, which is the effective user of this process."""
    uid = os.geteuid()
    try:
        return f"user:{pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user:{uid}"
