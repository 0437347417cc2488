"""Tests that Alertmanager takes back a rollout: a real fleet with a candidate that misses
deadlines, Prometheus with the shipped rules, and Alertmanager set up as the documents say.
"""

from __future__ import annotations

import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest
import yaml

from . import paced
from .fleet_process import PATIENCE_S, wait_until
from .test_model_switch import MEMORY, import_versions
from .test_slo_page import (
    PROGRAMS,
    RULES,
    free_address,
    has_counters,
    monitored,
    to_the_webhook,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .fleet_process import FleetProcess
    from .test_slo_page import Webhook

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "operations" / "rollout_gates.md"
CAUSES: Final = RULES.with_name("alerts.yml")
STEPS: Final = ("--steps", "50,100", "--bake", "1s", "--no-golden")
USERS: Final = 40
"""With a step of 50 %, at least one of so many users has the candidate."""


def told(admin: str, url: str) -> dict[str, Any]:
    """Return the documented configuration, with this admin port and for people a webhook."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    asked: dict[str, Any] = yaml.safe_load(blocks[0].replace("127.0.0.1:9100", admin))
    people = to_the_webhook(url)
    asked["receivers"][0]["webhook_configs"] = people["receivers"][0]["webhook_configs"]
    return asked | {"route": people["route"] | asked["route"]}


def ask(fleet: FleetProcess, user: str, *, is_late: bool = False) -> tuple[int, str]:
    """Send a request, perhaps with a deadline that its tokens cannot meet; return the status and
    the version."""
    body = {"model": "chat", "user": user, "prompt": "Once", "ignore_eos": True}
    body |= {"max_tokens": 60 if is_late else 1}
    headers = {"x-request-timeout-ms": "300"} if is_late else {}
    answer = fleet.client.post("/v1/completions", json=body, headers=headers)
    return answer.status_code, answer.headers["x-triolet-model-version"]


def user_of_candidate(fleet: FleetProcess, stable: str) -> str:
    """Return a user that has another version than the stable one."""
    found: list[str] = []

    def is_found() -> bool:
        names = (f"user-{number}" for number in range(USERS))
        found.extend(name for name in names if ask(fleet, name)[1] != stable)
        return bool(found)

    wait_until(is_found, PATIENCE_S, "a user has the candidate")
    return found[0]


def is_scraped(fleet: FleetProcess, webhook: Webhook, user: str) -> bool:
    """Send a good request; return whether Prometheus has counters of the candidate."""
    assert ask(fleet, user)[0] == 200
    return has_counters(fleet, webhook, '{model="chat-2"}')


def rollout(admin: str) -> dict[str, Any]:
    """Return the rollout of `chat`."""
    found = httpx2.get(f"http://{admin}/admin/rollouts/chat").raise_for_status()
    return dict(found.json())


@pytest.mark.slow
@pytest.mark.proof
def test_alertmanager_takes_back_a_candidate_that_misses_deadlines(
    start_fleet: Callable[..., FleetProcess],
    tmp_path: Path,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if not whole:
        pytest.skip("takes a minute: `make proofs` runs it")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # for the audit log
    store, admin = import_versions(tmp_path / "versions")["store"], free_address()
    port = admin.rpartition(":")[2]
    settings = ("--set", f"control.memory_bytes={MEMORY}", "--set", f"control.admin_port={port}")
    fleet = start_fleet("chat=chat:v1", "--store", store, *settings, command=paced.COMMAND)
    wait_until(lambda: bool(list(fleet.log_events("ready"))), PATIENCE_S, "control is up")
    _, stable = ask(fleet, "alice")
    code, said = fleet.run_triolet("rollout", "start", "chat", "--to", "chat:v2", *STEPS)
    assert code == 0, said
    wait_until(lambda: rollout(admin)["share"] == 0.5, PATIENCE_S, "half of all users move")
    user = user_of_candidate(fleet, stable)
    with monitored(tmp_path, fleet.url, (RULES, CAUSES), partial(told, admin)) as webhook:
        wait_until(lambda: is_scraped(fleet, webhook, user), PATIENCE_S, "Prometheus has counters")
        assert rollout(admin)["phase"] == "canary"
        began_at = time.monotonic()

        def is_back() -> bool:
            # One user is too little for the judge: the order must be Alertmanager's.
            assert ask(fleet, user, is_late=True)[0] == 504
            return rollout(admin)["phase"] == "rolled_back"

        wait_until(is_back, PATIENCE_S, "the rollout is rolled back")
        took_s = time.monotonic() - began_at
        last = rollout(admin)["history"][-1]
        assert (last["phase"], last["actor"]) == ("rolled_back", f"port:{port}")
        wait_until(lambda: ask(fleet, user)[1] == stable, PATIENCE_S, "the user is back")
        noticed = ("TrioletRolledBack", "firing")
        wait_until(lambda: noticed in webhook.came_at, PATIENCE_S, "people are told")
        told_s = webhook.came_at[noticed] - began_at
    wait_until(lambda: rollout(admin)["is_over"], PATIENCE_S, "the candidate is gone")
    [shown] = fleet.client.get("/fleet/rollouts").json()["data"]
    assert (shown["phase"], shown["share"]) == ("rolled_back", 0.0)
    record_property("rolled back after", round(took_s, 1))
    print(f"rolled back after {took_s:.1f} s, people were told after {told_s:.1f} s")  # noqa: T201
