"""Tests of restarting a model's workers with other settings, all or none, with real processes of
fake roles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ops.supervisor.group import GroupPhase
from ops.supervisor.slot import RestartFailed

from .recording import spec
from .test_groups import CONFIG, Fleet, running, until

if TYPE_CHECKING:
    from pathlib import Path

    from ops.supervisor.process_spec import ProcessSpec

pytestmark = (
    pytest.mark.slow
)  # one second each: needs real processes that fail to start and exit in order

NAMES = ("server-0", "a.prefill-0", "a.decode-0", "b.decode-0")


async def is_met(_: str) -> bool:
    return True


async def change(fleet: Fleet, *names: str) -> dict[str, ProcessSpec]:
    """Restart workers with other settings; a name may have a suffix with its behaviour."""
    specs = {}
    for name in names:
        one = spec(name, fleet.journal)
        specs[one.name] = replace(one, env={**one.env, "OTHER": "settings"})
    await fleet.supervisor.change_workers("a", specs, is_met, fleet.note)
    return specs


def settings_of(fleet: Fleet) -> set[str]:
    """Return the current and the next settings of the model's workers."""
    group = fleet.supervisor._models["a"]
    specs = [*group.specs, *group.spares.values(), *(slot.spec for slot in group.slots.values())]
    lives = [slot.current for slot in group.slots.values() if slot.current is not None]
    return {one.env.get("OTHER", "old") for one in (*specs, *(life.spec for life in lives))}


async def test_workers_change_in_turn_and_those_of_others_stay(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", *NAMES)) as fleet:
        assert settings_of(fleet) == {"old"}
        await change(fleet, "a.prefill-0", "a.decode-0", "a.decode-spare")
        assert fleet.words[len(NAMES) :] == [
            "a.prefill-0 ended",
            "a.prefill-0 started",
            "a.decode-spare started",
            "a.decode-0 ended",
            "a.decode-0 started",
            "a.decode-spare ended",
        ]
        assert settings_of(fleet) == {"settings"}
        assert fleet.lives("b.decode-0") == 1


async def test_workers_that_sleep_start_with_the_new_settings(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", *NAMES)) as fleet:
        await fleet.stop("a")
        await change(fleet, "a.prefill-0", "a.decode-0", "a.decode-spare")
        assert fleet.supervisor._models["a"].phase is GroupPhase.STOPPED
        assert fleet.lives("a.decode-0") == 1
        await fleet.start("a")
        assert settings_of(fleet) == {"settings"}


async def test_workers_that_are_about_to_start_change_too(tmp_path: Path) -> None:
    async with running(Fleet(tmp_path / "journal", *NAMES, stopped=("a",))) as fleet:
        fleet.supervisor._launch(fleet.supervisor._models["a"])
        await change(fleet, "a.prefill-0", "a.decode-0", "a.decode-spare")
        assert settings_of(fleet) == {"settings"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a.prefill-0:broken",), "a new a.prefill-0 .*config.json is missing; download it"),
        (("a.prefill-0", "a.decode-spare:crash"), "a new a.decode-spare exited with code 1"),
        (("a.prefill-0", "a.decode-0:crash"), "a new a.decode-0 exited with code 1"),
        (("a.prefill-0", "a.decode-0:mute"), "a.decode-0 was not ready after .*adapter_start_s"),
    ],
)
async def test_a_worker_that_does_not_start_leaves_all_as_they_were(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    # Short timeout for workers that never become ready; all others start within a minute.
    is_short = names[-1].endswith("mute")
    config = replace(CONFIG, adapter_start_s=0.5, worker_exit_s=0.5) if is_short else CONFIG
    fleet = Fleet(tmp_path / "journal", *NAMES, config=config)
    async with running(fleet):
        with pytest.raises(RestartFailed, match=words):
            await change(fleet, *names)
        assert settings_of(fleet) == {"old"}
        await until(lambda: all(one.is_ready for one in fleet.supervisor.models()[0].workers))
        assert not fleet.recorder.failures
        assert fleet.supervisor.restarting == ()
        await change(fleet, "a.prefill-0", "a.decode-0", "a.decode-spare")
        assert settings_of(fleet) == {"settings"}
