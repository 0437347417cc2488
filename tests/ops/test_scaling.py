"""Tests of `Scaling`: the processes for a new number of workers, and the files that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from ops.cli.target_commands import Where, run_scale
from ops.running_fleets import NOTE, Note
from ops.settings.form import Settings
from ops.supervisor.plan import Door, FleetPlan, plan_processes
from ops.supervisor.scaling import MEMBERS, Scaling
from ops.supervisor.slot import RestartFailed
from triolet.config import Pinning
from triolet.config.members import read_members
from triolet.errors import ConfigError
from triolet.ids import Role

from .test_pure_parts import of_models, own, plan, with_fleet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ops.supervisor.process_spec import ProcessSpec

CORES = range(4)


def scaling(fleet: FleetPlan, directory: Path) -> Scaling:
    def specs(grown: FleetPlan) -> tuple[Sequence[ProcessSpec], Sequence[ProcessSpec]]:
        return plan_processes(grown, ("triolet",), directory, 1, CORES, [Door(3)])

    return Scaling(fleet, Note(8000, "http://127.0.0.1:8000", {}), directory, specs)


def members(directory: Path) -> list[tuple[str, str, str]]:
    content = (directory / MEMBERS).read_bytes()
    return [
        (one.model, one.role.value, one.address.rpartition("/")[2])
        for one in read_members(content, MEMBERS).members
    ]


def test_a_role_grows_and_shrinks_and_the_others_stay(tmp_path: Path) -> None:
    one = scaling(plan(), tmp_path)
    grown = one.plan("", Role.DECODE, 3)
    assert [spec.name for spec in grown] == ["decode-0", "decode-1", "decode-2"]
    assert own(grown[2]).control_address == f"ipc://{tmp_path}/decode-2.control"
    # Running workers lend cores by the old number of workers.
    assert own(grown[2]).lending is None
    one.note("", ["prefill-0", "decode-0", "decode-1"])
    assert members(tmp_path) == [
        ("", "prefill", "prefill-0.control"),
        ("", "decode", "decode-0.control"),
        ("", "decode", "decode-1.control"),
        ("", "prefill", "prefill-spare.control"),
        ("", "decode", "decode-spare.control"),
    ]
    note = msgspec.json.decode((tmp_path / NOTE).read_bytes(), type=Note)
    assert list(note.workers) == ["prefill-0", "decode-0", "decode-1"]
    assert [spec.name for spec in one.plan("", Role.DECODE, 1)] == ["decode-0"]


def test_one_of_several_models_grows(tmp_path: Path) -> None:
    one = scaling(of_models("chat", "code"), tmp_path)
    grown = one.plan("code", Role.PREFILL, 2)
    assert [spec.name for spec in grown] == ["code.prefill-0", "code.prefill-1"]
    assert {spec.model for spec in grown} == {"code"}
    one.note("code", ["code.prefill-0", "code.prefill-1", "code.decode-0"])
    by_model = {model for model, _, _ in members(tmp_path)}
    assert by_model == {"chat", "code"}
    assert ("code", "prefill", "m1.prefill-1.control") in members(tmp_path)


def test_workers_that_run_stay_members_when_another_number_was_planned_and_refused(
    tmp_path: Path,
) -> None:
    one = scaling(of_models("chat", "code"), tmp_path)
    one.plan("chat", Role.DECODE, 3)
    running = ["chat.prefill-0", "chat.decode-0", "chat.decode-1", "chat.decode-2"]
    one.note("chat", running)
    one.plan("chat", Role.DECODE, 1)  # the supervisor may refuse it, for example during a restart
    one.plan("code", Role.PREFILL, 2)
    one.note("code", ["code.prefill-0", "code.prefill-1", "code.decode-0"])
    note = msgspec.json.decode((tmp_path / NOTE).read_bytes(), type=Note)
    assert {name for name in note.workers if name.startswith("chat.")} == set(running)
    assert len([model for model, _, _ in members(tmp_path) if model == "chat"]) == 6


def test_a_file_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    one = scaling(plan(), tmp_path)
    (tmp_path / MEMBERS).mkdir()
    with pytest.raises(RestartFailed, match=r"cannot write the workers .*free disk space"):
        one.note("", ["prefill-0", "decode-0"])


@pytest.mark.parametrize(
    ("model", "role", "count", "words"),
    [
        ("chat", Role.DECODE, 2, "no model is called 'chat'; give decode=2"),
        ("", Role.DECODE, 0, "decode is 0; allowed: 1 to 64"),
        ("", Role.DECODE, 65, "allowed: 1 to 64"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, model: str, role: Role, count: int, words: str
) -> None:
    one = scaling(plan(), tmp_path)
    with pytest.raises(ConfigError, match=words):
        one.plan(model, role, count)
    assert [spec.name for spec in one.plan("", Role.DECODE, 1)] == ["decode-0"]


@pytest.mark.parametrize(
    ("fleet", "role", "count", "words"),
    [
        (
            of_models("chat", "code"),
            Role.PREFILL,
            3,
            r"^prefill=3 does not name a model; give chat\.prefill=3",
        ),
        # With reserved cores the number is fixed.
        (
            with_fleet(plan(), pin=Pinning.AUTO),
            Role.DECODE,
            2,
            r"start the fleet with fleet\.decode=2",
        ),
    ],
    ids=["no model", "cores of their own"],
)
def test_a_number_that_a_fleet_does_not_take_is_answered_with_what_to_say(
    tmp_path: Path, fleet: FleetPlan, role: Role, count: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        scaling(fleet, tmp_path).plan("", role, count)


def test_commands_are_told_which_models_requests_may_name(tmp_path: Path) -> None:
    one = scaling(of_models("chat", "code"), tmp_path)
    one.set_served("chat", is_served=False)
    note = msgspec.json.decode((tmp_path / NOTE).read_bytes(), type=Note)
    assert note.models == ("code",)
    only = scaling(plan(), tmp_path)
    only.note("", ["decode-0"])
    note = msgspec.json.decode((tmp_path / NOTE).read_bytes(), type=Note)
    assert note.models == only.now.model_names


@pytest.mark.parametrize("target", ["decode", "decode=", "control=2", "=2", "decode=-1", "a.b=1"])
def test_a_target_that_says_something_else_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="is not a target; allowed:"):
        run_scale([target], Where.LOCAL, "", Settings(), None, None)
