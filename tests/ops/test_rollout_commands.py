"""Tests of the command line of rollouts: what it sends to control, prints and refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ops.cli import main, rollout_commands
from ops.exit_codes import EXIT_BAD_INPUT, CommandFailed

if TYPE_CHECKING:
    from collections.abc import Callable

SHOWN: dict[str, Any] = {
    "id": "12ab",
    "model": "chat",
    "stable": "chat",
    "candidate": "chat-2",
    "phase": "canary",
    "step": 2,
    "shares": [0.01, 0.1, 1.0],
    "share": 0.1,
    "said": "step 2 has run for 45 of 60 s",
    "trouble": "",
    "counts": {"errors": [980, 20, 99, 1]},
    "cost": [0.95, 1.052],
    "history": [{"at": 0.0, "phase": "canary", "step": 1, "said": "step 0 has passed"}],
    "revision": 7,
    "is_over": True,
    "is_left": False,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Answer requests to control, and return what was asked."""
    found: list[tuple[Any, ...]] = []

    def answer(*given: Any) -> dict[str, Any]:  # noqa: ANN401 (as `ask_control`)
        found.append(given)
        return (
            SHOWN if given[2] != "/admin/rollouts" or given[1] == "POST" else {"rollouts": [SHOWN]}
        )

    monkeypatch.setattr(rollout_commands, "ask_control", answer)
    return found


def test_start_sends_shares_and_seconds(asked: list[tuple[Any, ...]]) -> None:
    words = "rollout start chat --to chat:v2 --steps 5%,50,100 --bake 2m --max-step 2h"
    more = "--shadow 10% --accept-cost 1.5x --cap-streams 4 --cap-tenant-share 25 --no-golden"
    assert (
        main((*words.split(), *more.split(), "--exclude-tenant", "a", "--exclude-tenant", "b")) == 0
    )
    [(port, method, path, body)] = asked
    assert (port, method, path) == (None, "POST", "/admin/rollouts")
    expected = {
        "model": "chat",
        "ref": "chat:v2",
        "shares": [0.05, 0.5, 1.0],
        "bake_s": 120,
        "max_step_s": 7200,
        "retention_s": None,
        "shadow_share": 0.1,
        "experiment": None,
        "accept_cost": 1.5,
        "cap_streams": 4,
        "cap_tenant_share": 0.25,
        "excluded_tenants": ["a", "b"],
        "golden": False,
        "despite_freeze": False,
    }
    assert body.items() >= expected.items()


def test_status_shows_where_a_rollout_is(
    asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("rollout", "status")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "chat: canary, step 2 of 3; 10 % of requests to chat-2, the others to chat  (rollout 12ab)",
        "  step 2 has run for 45 of 60 s",
        "  errors: chat 20 bad of 1000, chat-2 1 bad of 100",
        "  device time for the same work: 0.95 to 1.05 times chat's",
    ]
    assert lines[4].endswith("canary, step 1: step 0 has passed")
    assert main(("rollout", "status", "chat", "--watch", "--json")) == 0
    assert json.loads(capsys.readouterr().out) == [SHOWN]
    assert [path for _, _, path in asked] == ["/admin/rollouts", "/admin/rollouts/chat"]


def poll(*answers: dict[str, Any] | CommandFailed) -> Callable[..., dict[str, Any]]:
    """Return an `ask_control` that gives these answers."""
    given = iter(answers)

    def answer(*_: object) -> dict[str, Any]:
        one = next(given)
        if isinstance(one, CommandFailed):
            raise one
        return one

    return answer


def test_watch_prints_changes_but_no_counts_and_survives_a_restart_of_control(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout_commands, "WATCH_S", 0.0)
    begun = SHOWN | {"is_over": False}
    changed = begun | {"counts": {"errors": [0, 0, 0, 0]}, "said": "step 2 has run for 47 of 60 s"}
    later = begun | {"step": 3, "said": "step 3 has run for 0 of 60 s"}
    away = CommandFailed("control does not answer")
    answers = poll(begun, changed, away, changed, later, later | {"is_over": True})
    monkeypatch.setattr(rollout_commands, "ask_control", answers)
    assert main(("rollout", "status", "chat", "--watch")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  step")]
    assert said == ["  step 2 has run for 45 of 60 s", *["  step 3 has run for 0 of 60 s"] * 2]
    monkeypatch.setattr(rollout_commands, "AWAY_S", 0.0)
    monkeypatch.setattr(rollout_commands, "ask_control", poll(begun, away))
    assert main(("rollout", "status", "chat", "--watch")) != 0
    assert "control does not answer" in capsys.readouterr().err
    left = begun | {"is_left": True, "trouble": "another control has changed it"}
    monkeypatch.setattr(rollout_commands, "ask_control", poll(begun, left))
    assert main(("rollout", "status", "chat", "--watch")) != 0
    assert "chat: another control has changed it" in capsys.readouterr().err


def test_an_order_names_the_revision_that_was_seen_and_a_rollback_any(
    asked: list[tuple[Any, ...]],
) -> None:
    assert main(("rollout", "promote", "chat", "--full")) == 0
    assert asked[1][1:] == ("POST", "/admin/rollouts/chat/promote_fully", {"revision": 7})
    asked.clear()
    assert main(("rollout", "rollback", "chat")) == 0
    assert asked[0][3] == {"revision": None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--bake soon", "--bake is 'soon'; allowed: a duration such as 60s, 30m or 2h"),
        ("--steps 1,x,100", "--steps has 'x', which is no number"),
        ("--accept-cost x", "--accept-cost has 'x', which is no number"),
    ],
)
def test_what_is_no_number_is_refused(
    words: str, said: str, asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("rollout", "start", "chat", "--to", "v2", *words.split())) == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err
    assert main(("rollout", "status", "--watch")) == EXIT_BAD_INPUT
    assert asked == []
