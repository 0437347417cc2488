"""Tests that docs/protocol.md matches the code: frames, fields, states, reasons and numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from transport import frames
from transport.frames import EndReason, Part, RefuseReason
from transport.lease import DECODE_TRANSITIONS, PREFILL_TRANSITIONS
from transport.link import MAX_BAD_FRAMES
from transport.liveness import QUIET_INTERVALS, PeerEvent
from transport.liveness import TRANSITIONS as PEER_TRANSITIONS
from triolet.config import LinkConfig

from .strategies import FRAME_TYPES, tag_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import Enum

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
LINK = LinkConfig()


def section(title: str) -> str:
    """Return the text below a heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows except headers and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = {index for index, row in enumerate(tables) if set("".join(row)) <= set("-: ")}
    return [row for index, row in enumerate(tables) if not {index, index + 1} & rules]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_frame_is_documented_with_its_tag_and_fields() -> None:
    documented = [
        (int(tag), words(name)[0], words(fields))
        for tag, name, _, fields in rows(section("Frames"))
    ]
    assert documented == [(tag_of(t), t.__name__, list(t.__struct_fields__)) for t in FRAME_TYPES]


def test_every_group_is_documented_with_its_fields() -> None:
    groups = {
        value.__name__: list(value.__struct_fields__)
        for value in vars(frames).values()
        if isinstance(value, type) and issubclass(value, Part) and value is not Part
    }
    assert {words(name)[0]: words(fields) for name, fields in rows(section("Messages"))} == groups


def test_every_reason_is_documented() -> None:
    named = [words(row[0])[0] for row in rows(section("Ends"))]
    assert named == [*EndReason, *RefuseReason]


def diagrams(title: str) -> list[set[tuple[str, str, str]]]:
    """Return the (from, to, event) steps of each state diagram of a section."""
    blocks = re.findall(r"stateDiagram-v2\n(.*?)```", section(title), re.DOTALL)
    return [set(re.findall(r"(\w+) --> (\w+): (\w+)", block)) for block in blocks]


def steps(table: Mapping[Enum, Mapping[Enum, Enum]]) -> set[tuple[str, str, str]]:
    return {
        (state.name, following.name, event.name)
        for state, row in table.items()
        for event, following in row.items()
    }


def test_the_diagrams_are_the_tables() -> None:
    assert diagrams("Leases") == [steps(DECODE_TRANSITIONS), steps(PREFILL_TRANSITIONS)]  # type: ignore[arg-type]
    assert diagrams("Liveness") == [steps(PEER_TRANSITIONS)]  # type: ignore[arg-type]
    events = [row[0] for row in rows(section("Liveness"))]
    assert events == [event.name for event in PeerEvent]


@pytest.mark.parametrize(
    ("title", "claim"),
    [
        ("Versions", f"`PROTOCOL_VERSION` is {frames.PROTOCOL_VERSION}"),
        ("Versions", f"and {frames.OLDEST_PROTOCOL_VERSION} is the oldest version"),
        ("Leases", f"lives `lease_ttl_s` ({LINK.lease_ttl_s:g} s) longer"),
        ("Leases", f"For {LINK.tombstone_s:g} s a worker remembers"),
        ("Liveness", f"a heartbeat every {LINK.heartbeat_interval_s:g} s"),
        ("Liveness", f"at most every {1000 * LINK.load_report_interval_s:g} ms"),
        ("Liveness", f"two heartbeats ({QUIET_INTERVALS * LINK.heartbeat_interval_s:g} s)"),
        ("Liveness", f"`peer_timeout_s` ({LINK.peer_timeout_s:g} s)"),
        ("Liveness", f"`hello_timeout_s` ({LINK.hello_timeout_s:g} s)"),
        ("Liveness", f"`progress_timeout_s` ({LINK.progress_timeout_s:g} s)"),
        ("KV transfer", f"`kv_chunk_bytes` ({LINK.kv_chunk_bytes // 2**20} MiB"),
        ("Sockets", f"`TCP_MAXRT` {LINK.dead_host_s:g} s"),
        ("What is refused", f"{frames.MAX_ROWS:,}"),
        ("What is refused", f"{frames.MAX_TOKEN_ROWS:,} token rows"),
        ("What is refused", f"over {LINK.max_control_frame_bytes // 2**20} MiB (control)"),
        ("What is refused", f"{LINK.max_kv_frame_bytes // 2**20} MiB (KV)"),
        ("What is refused", {3: "after three of them"}[MAX_BAD_FRAMES]),
    ],
)
def test_the_numbers_are_the_codes(title: str, claim: str) -> None:
    assert claim in " ".join(section(title).split())


def test_every_setting_that_is_named_exists() -> None:
    named = set(re.findall(r"`(\w+_(?:s|bytes|peers|attempts))`", TEXT))
    known = set(LINK.__dataclass_fields__) | {"max_attempts"}
    fields = {name for t in FRAME_TYPES for name in t.__struct_fields__}
    groups = {name for row in rows(section("Messages")) for name in words(row[1])}
    assert named <= known | fields | groups
