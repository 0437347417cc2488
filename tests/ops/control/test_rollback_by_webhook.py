"""Tests that a rollback takes the body of Alertmanager's notifications, and that other orders
refuse fields that they do not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ops.control import model_steps
from tests.ops.control.rollout_fleet import rollout_scene

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NOTIFICATION: Final[dict[str, Any]] = {
    "receiver": "rollback-chat",
    "status": "firing",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "TrioletRolloutBurns", "model": "chat", "version": "chat-2"},
            "annotations": {},
            "startsAt": "2026-01-01T00:00:00Z",
        }
    ],
    "groupLabels": {},
    "commonLabels": {"alertname": "TrioletRolloutBurns"},
    "externalURL": "http://localhost:9093",
    "version": "4",
    "groupKey": "{}",
    "truncatedAlerts": 0,
}


async def test_a_notification_rolls_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # for the audit log
    monkeypatch.setattr(model_steps, "MEET_S", 0.0)
    async with rollout_scene() as one:
        await one.start(max_step_s=3600, bake_s=600)
        for order in ("pause", "promote"):
            status, refusal = await one.order(order, **NOTIFICATION)
            assert (status, "unknown field" in str(refusal)) == (400, True)
        status, shown = await one.order("rollback", **NOTIFICATION)
        assert (status, shown["phase"]) == (200, "rolled_back")
        status, refusal = await one.order("rollback", **NOTIFICATION)
        assert status == 409, refusal
