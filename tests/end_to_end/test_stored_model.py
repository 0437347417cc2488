"""Tests of serving a model version from the model store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ops.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .fleet_process import FleetProcess


@pytest.mark.promise
@pytest.mark.slow
def test_a_version_answers_under_its_name_and_stays_while_it_is_served(
    start_fleet: Callable[..., FleetProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A separate fleet: its workers read the weights through the version's links.
    where = ("--store", str(tmp_path / "store"))
    assert main(("model", "import", "demo", "--name", "stories", *where)) == 0
    digest = capsys.readouterr().out.strip()
    assert main(("model", "alias", "stories@stable", "stories", *where)) == 0
    fleet = start_fleet("stories@stable", *where)
    asked = {
        "model": "stories",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "temperature": 0,
    }
    answer = fleet.client.post("/v1/chat/completions", json=asked).json()
    assert answer["choices"][0]["message"]["content"] == "12 + 30 = 42."
    (event,) = fleet.log_events("model_version")
    assert event["digest"] == digest
    assert main(("model", "rm", "stories@stable", *where)) == 0
    assert main(("model", "gc", *where)) == 0
    assert (
        f"{digest} is removed, but its blobs stay on disk while it is served"
        in capsys.readouterr().err
    )
