"""Tests of tools on models without a tool template: seeded conversations on real fleets."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from ops.models.fetch import is_kept
from ops.models.known import SMOLLM2

from .conftest import COUNTING, PATIENT
from .scripted_model import DEMO, write_model
from .tool_conversations import CHOICES, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .fleet_process import FleetProcess

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.proof]

NUM_CONVERSATIONS, NUM_CONVERSATIONS_WHOLE = 24, 200
MODEL = "model"
OPTIONS = (
    *(*PATIENT, *COUNTING, "--model-name", MODEL),
    # Limits would refuse requests that wait long on a slow machine.
    *("--set", "server.overload.admission.is_on=false"),
    *("--set", "server.overload.brownout.is_on=false"),
    *("--set", "server.overload.guard.is_on=false"),
)


def check(fleet: FleetProcess, num_conversations: int) -> None:
    """Run conversations on a fleet; each tool choice must have its effect."""
    found = run(fleet.url, MODEL, num_conversations)
    log.info("%d conversations: %s", num_conversations, dict(sorted(found.items())))
    kinds = {kind for kind in found if kind != "calls"}
    assert sum(found[kind] for kind in kinds) == num_conversations
    assert {kind.partition(":")[0] for kind in kinds} == set(CHOICES)
    assert found["required: calls"]
    assert found["named: calls"]


def test_calls_of_the_demo_model_keep_to_their_schemas_in_every_api(
    start_fleet: Callable[..., FleetProcess], tmp_path: Path, whole: bool
) -> None:
    # The demo model's 1,024 positions are too few for several tools.
    words = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    directory = write_model(tmp_path / "roomy", template=words["chat_template"])
    fleet = start_fleet(str(directory), *OPTIONS, "--kv-pool", "256MiB")
    check(fleet, NUM_CONVERSATIONS_WHOLE if whole else NUM_CONVERSATIONS)


@pytest.mark.timeout(1800)
def test_calls_of_smollm2_keep_to_their_schemas_in_every_api(
    start_fleet: Callable[..., FleetProcess], whole: bool
) -> None:
    if not whole:
        pytest.skip("takes minutes: `make proofs` runs it")
    if not is_kept(SMOLLM2):
        pytest.skip("SmolLM2 is not on this machine: `triolet serve smollm2` fetches it")
    fleet = start_fleet("smollm2", *OPTIONS, "--kv-pool", "1GiB", "--dtype", "bfloat16")
    check(fleet, NUM_CONVERSATIONS_WHOLE)
