"""Tests of rollouts through control: real control, sockets and store, a fake supervisor and servers
that report made-up requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ops.control import model_steps
from tests.ops.control.fleets import states
from tests.ops.control.rollout_fleet import rollout_scene

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def no_wait_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_steps, "MEET_S", 0.0)


async def test_a_good_candidate_gets_all_requests_step_by_step_and_then_the_name() -> None:
    async with rollout_scene() as one:
        status, shown = await one.start()
        assert (status, shown["phase"], shown["candidate"]) == (202, "preparing", "chat-2")
        ended = await one.ends()
        assert (ended["phase"], ended["share"]) == ("promoted", 1.0)
        steps = [note["step"] for note in ended["history"] if note["phase"] == "canary"]
        assert steps == [1, 2, 3]
        assert one.supervisor.routes["chat"]["shares"] == {"chat-2": 1.0}
        assert await states(one.folder) == {"chat-2": "serving"}
        assert one.server.route is None, "the permanent route is enough"
        assert [name for kind, name in one.supervisor.requests if kind == "drop_model"] == ["chat"]


async def test_a_bad_candidate_is_rolled_back_and_removed() -> None:
    async with rollout_scene() as one:
        one.server.bad = lambda version: version == "chat-2"
        await one.start()
        ended = await one.ends()
        assert (ended["phase"], ended["share"]) == ("rolled_back", 0.0)
        assert "missed errors" in ended["said"]
        assert one.server.route is None
        assert await states(one.folder) == {"chat": "staged"}
        assert one.supervisor.routes["chat"]["shares"] != {"chat-2": 1.0}
        assert [*one.supervisor.added] == ["chat"]
