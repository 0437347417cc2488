"""Tests of targets that need no Ray: choosing one, desired numbers in Redis, local fleets, reports
on actors and nodes, and `OwnedProcess`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import trio
import trio.lowlevel

from ops.cli import main
from ops.cli.target_commands import Where, run_scale, shown
from ops.exit_codes import CommandFailed
from ops.running_fleets import SUPERVISOR_SOCKET, Note, RunningFleet
from ops.settings.form import Settings
from ops.supervisor.model_status import ModelStatus, RunningWorker, RunState
from ops.supervisor.starter import Starter
from ops.supervisor.supervisor_socket import (
    ModelsAnswer,
    ModelsRequest,
    OrderFinished,
    ScaleRequest,
    StepBegan,
    answer_commands,
)
from ops.targets.actors import (
    WorkerState,
    actor_name,
    lacking,
    name_of,
    observed,
    place_of,
    require_place,
)
from ops.targets.desired import DesiredStore
from ops.targets.kubernetes import KubernetesTarget
from ops.targets.local import LocalTarget
from ops.targets.owned_process import OwnedProcess
from ops.targets.target import Observed
from tests.server.tenants.redis_server import RedisServer, running_redis
from transport.registrations import (
    LABEL_OR_NONE,
    MAX_DESIRED,
    REGISTER,
    RegistrationCalls,
    read_desired,
    written_registration,
)
from triolet.config import RayConfig, ServerConfig, SupervisorConfig
from triolet.config.members import Member
from triolet.config.membership import RedisMembersConfig
from triolet.errors import ConfigError
from triolet.ids import Place, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ops.supervisor.supervisor_socket import Request, Tell

DECODE: Final = Place("", Role.DECODE, "a")
PATIENCE_S: Final = 60.0
ROOT: Final = Path(__file__).parents[2]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


def test_names_of_actors_tell_place_and_number() -> None:
    for place in (Place("chat-2", Role.PREFILL, "eu-1.a"), Place("", Role.SERVER), DECODE):
        assert place_of(actor_name(place, 3)) == (place, 3)
    assert name_of(Place("chat", Role.DECODE, "a"), 0) == "chat.decode-a-0"
    assert name_of(Place("", Role.DECODE), 1) == "decode-1"


def node(
    zone: str | None, cpus: float, gpus: float = 0.0, *, is_alive: bool = True
) -> dict[str, Any]:
    labels = {} if zone is None else {"zone": zone}
    return {"Alive": is_alive, "Labels": labels, "Resources": {"CPU": cpus, "GPU": gpus}}


@pytest.mark.parametrize(
    ("zone", "needs", "lack"),
    [
        ("", {"CPU": 4.0}, ""),
        ("a", {"CPU": 4.0}, ""),
        ("", {"CPU": 8.0}, "no node has 8 CPU (at most 4)"),
        ("a", {"CPU": 1.0, "GPU": 1.0}, "no node of zone a has 1 GPU (at most 0)"),
        ("b", {"CPU": 1.0}, "no node has the label zone=b (zones: a, none)"),
    ],
)
def test_what_no_node_has_is_named(zone: str, needs: dict[str, float], lack: str) -> None:
    nodes = [node("a", 4.0), node(None, 2.0), node("b", 9.0, 8.0, is_alive=False)]
    assert lacking(nodes, zone, needs) == lack


def test_each_process_that_does_not_serve_has_a_line() -> None:
    states = {
        0: WorkerState(is_ready=True, zone="a", url="http://a"),
        1: WorkerState(is_ready=True, zone="b"),
        2: WorkerState(zone="a", trouble="it was killed by SIGKILL"),
        3: WorkerState(zone="a"),
        4: "no node has 8 CPU",
    }
    found = observed(6, DECODE, states)
    assert (found.desired, found.alive, found.urls) == (6, 2, ("http://a",))
    assert found.hindrances == (
        "decode-a-1: it runs in zone b",
        "decode-a-2: it was killed by SIGKILL",
        "decode-a-3: it starts",
        "decode-a-4: no node has 8 CPU",
        "1 not started; `triolet fleet up` starts what is missing",
    )
    assert shown({DECODE: found}) == [
        "decode --zone a: 2 of 6",
        "  http://a",
        *(f"  {line}" for line in found.hindrances[:3]),
        "  and 2 more",
    ]
    assert shown({Place("chat", Role.PREFILL): Observed(None, 1)}) == [
        "chat.prefill: 1, and no number was asked for"
    ]
    assert shown({Place("chat", Role.DECODE): Observed(3, None)}) == [
        "chat.decode: desired 3; `kubectl get pods` shows the pods"
    ]


def test_nonsense_in_the_hash_of_desired_numbers_is_left_out() -> None:
    answer = ['["chat", "decode", "a"]', "3", '["", "prefill", ""]', "-2", "nonsense", "1"]
    answer += ['["", "control", ""]', "1", '["a b", "decode", ""]', "1", '["", "decode", "x"]', "?"]
    found = read_desired(answer)
    assert found == {Place("chat", Role.DECODE, "a"): 3, Place("", Role.PREFILL): 0}
    assert LABEL_OR_NONE.fullmatch("eu-1.a_b")


async def register(config: RedisMembersConfig, place: Place) -> None:
    member = Member(place.role, "tcp://10.0.0.1:7000", place.model)
    text = written_registration(member, {"zone": place.zone})
    await RegistrationCalls(config, "redis").once(REGISTER, text, PATIENCE_S)


async def test_desired_numbers_are_kept_in_redis_until_they_are_forgotten(
    redis: RedisServer, tmp_path: Path
) -> None:
    (place := tmp_path / "redis.url").write_text(redis.url)
    store = DesiredStore(RedisMembersConfig(f"@{place}", timeout_s=PATIENCE_S))
    target, told = KubernetesTarget(store, store), list[str]()
    await target.scale(DECODE, 3, told.append)
    await target.scale(DECODE, 2, told.append)
    assert await target.observe() == {DECODE: Observed(2, 0)}
    other = RedisMembersConfig(f"@{place}", fleet="other", timeout_s=PATIENCE_S)
    for members, alive in ((None, None), (DesiredStore(other), 1)):
        await register(other, DECODE)
        found = await KubernetesTarget(store, members).observe()
        assert found == {DECODE: Observed(2, alive)}
    assert told[-1] == ("wrote 2 as the desired number of decode --zone a; the autoscaler follows")
    target.check(DECODE)
    with pytest.raises(ConfigError, match="their autoscaler follows processor time"):
        target.check(Place("", Role.SERVER))
    places = [f'["m{number}", "decode", ""]' for number in range(MAX_DESIRED)]
    redis.command("HSET", "{triolet}:triolet:desired", *(w for one in places for w in (one, "1")))
    assert await store.numbers() == {}, "too many are not read"
    await store.forget()
    assert await target.observe() == {}
    redis.stop()
    with pytest.raises(CommandFailed, match="the fleet's Redis does not answer: "):
        await target.scale(DECODE, 1, told.append)


class Supervisor:
    """A fake supervisor that answers on its socket."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def obey(self, request: Request, tell: Tell) -> None:
        self.asked.append(request)
        if isinstance(request, ModelsRequest):
            workers = [RunningWorker(f"decode-{n}", Role.DECODE, n, n == 0) for n in range(2)]
            await tell(ModelsAnswer([ModelStatus("chat", RunState.STARTING, workers)]))
        else:
            await tell(StepBegan("decode-1 starts"))
            await tell(OrderFinished())


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[tuple[LocalTarget, Supervisor]]:
    supervisor = Supervisor()
    async with trio.open_nursery() as nursery:
        path = folder / SUPERVISOR_SOCKET
        await nursery.start(partial(answer_commands, path, supervisor.obey))
        yield LocalTarget(RunningFleet(folder, Note(8000))), supervisor
        nursery.cancel_scope.cancel()


async def test_a_local_fleet_is_scaled_and_observed_by_its_supervisor(tmp_path: Path) -> None:
    async with local(tmp_path) as (target, supervisor):
        place, told = Place("chat", Role.DECODE), list[str]()
        await target.scale(place, 2, told.append)
        assert supervisor.asked == [ScaleRequest("chat", Role.DECODE, 2)]
        assert told == ["decode-1 starts"]
        found = await target.observe()
        assert found == {place: Observed(2, 1, ("decode-1: it starts",))}
        for wrong in (Place("chat", Role.DECODE, "a"), Place("", Role.SERVER)):
            with pytest.raises(ConfigError, match=r"leave it out|at its start"):
                target.check(wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("decode=2 server=3", "the number of servers of `triolet serve` is set at its start"),
        ("decode=2 decode=3", "decode=2 decode=3 names the same workers twice"),
    ],
)
def test_a_wrong_place_beside_a_right_one_changes_nothing(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No supervisor runs here, so scaling anything would fail with another error.
    fleet = RunningFleet(tmp_path, Note(8000))
    monkeypatch.setattr("ops.cli.target_commands.fleet_to_change", lambda _: fleet)
    with pytest.raises(ConfigError, match=said):
        run_scale(words.split(), Where.LOCAL, "", Settings(), None, tmp_path / "audit")


@pytest.mark.parametrize(
    ("place", "zones", "said"),
    [
        (Place("", Role.DECODE), (), r"for the model '', but the settings have 'chat'"),
        (Place("chatt", Role.DECODE), (), r"'chatt', but .* give chat\.decode=NUMBER"),
        (Place("chat", Role.SERVER), (), r"'chat', but .* give server=NUMBER"),
        (Place("chat", Role.DECODE), ("a", "b"), r"has: a, b; add --zone with one of them"),
        (Place("chat", Role.DECODE, "c"), ("a", "b"), r"'c', but ray\.zones has: a, b; add"),
        (Place("", Role.SERVER, "a"), (), r"'a', but ray\.zones has: none; leave --zone out"),
    ],
)
def test_a_place_that_is_not_in_the_settings_of_ray_is_refused(
    place: Place, zones: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        require_place(place, "chat", zones)
    for own in (Place("chat", Role.PREFILL, "b"), Place("", Role.SERVER, "a")):
        require_place(own, "chat", ("a", "b"))
    require_place(Place("", Role.DECODE), "", ())


def of_ray(tmp_path: Path) -> list[str]:
    """Return the options of a fleet that needs only Ray."""
    (url := tmp_path / "redis.url").write_text("redis://127.0.0.1:1/0")
    told = {f"{role}.membership.redis.url": f"@{url}" for role in ("server", "worker")}
    told |= {f"{role}.curve_dir": "keys" for role in ("server", "worker")}
    options = [word for name, value in told.items() for word in ("--set", f"{name}={value}")]
    return [*options, "--audit", str(tmp_path / "audit")]


@pytest.mark.parametrize(
    "words", ["fleet up", "fleet down", "scale decode=2 --on ray", "fleet up --on ray://h:1"]
)
def test_without_ray_the_error_says_how_to_install_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ops.targets.ray_target", raising=False)
    assert main([*words.split(), *of_ray(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == "triolet: --on ray needs Ray; `pip install 'triolet[ray]'` installs it\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fleet status --on nowhere", "--on is 'nowhere'; allowed: local, kubernetes, ray"),
        ("fleet up --on local", "--on is 'local', but this command is for Ray; allowed: ray, "),
        ("fleet up --on ray://h", "--on is 'ray://h', but"),
        ("fleet status --on kubernetes", "server.membership.redis.url is missing"),
        ("scale decode=1 --set server.zone=a", "--set has no effect on a local fleet"),
    ],
)
def test_a_wrong_target_is_one_line(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [] if "status" in words else ["--audit", str(tmp_path / "audit")]
    assert main([*words.split(), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"triolet: {said}")
    assert error.count("\n") == 1


class PastFleet:
    """A target with desired numbers from an earlier start."""

    def __init__(self) -> None:
        self.scaled: dict[Place, int] = {}

    async def observe(self) -> dict[Place, Observed]:
        return {
            Place("", Role.DECODE, "a"): Observed(3, 3),
            Place("", Role.PREFILL, "a"): Observed(1, 1),
            Place("", Role.SERVER, "a"): Observed(None, 0),
            Place("", Role.DECODE, "gone"): Observed(4, 4),
        }

    async def scale(self, place: Place, count: int, tell: object) -> None:
        self.scaled[place] = count


def test_a_start_with_other_numbers_says_which_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    past = PastFleet()
    monkeypatch.setattr("ops.cli.target_commands.opened_ray", lambda *_: nullcontext(past))
    numbers = {"zones": "a", "decode": "2", "prefill": "1", "servers": "2"}
    names = {"zones": "ray.zones"} | {name: f"fleet.{name}" for name in list(numbers)[1:]}
    options = [word for name, n in numbers.items() for word in ("--set", f"{names[name]}={n}")]
    assert main(["fleet", "up", *options, "--audit", str(tmp_path / "audit")]) == 0
    counts = {Role.DECODE: 3, Role.PREFILL: 1, Role.SERVER: 2}
    assert past.scaled == {Place("", role, "a"): count for role, count in counts.items()}
    said = [line.partition("s  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "decode --zone a stays at 3, as asked for before; `triolet scale` changes it",
        "done: every process is ready",
    ]


@pytest.mark.parametrize("command", ["up", "down"])
def test_commands_for_ray_only_offer_no_other_place(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "ray, or ray://HOST:PORT" in text
    assert "kubernetes" not in text


@pytest.mark.parametrize("at", range(4))
def test_a_setting_that_a_fleet_on_ray_lacks_is_named(
    at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = of_ray(tmp_path)
    name = options[2 * at + 1].partition("=")[0]
    del options[2 * at : 2 * at + 2]
    assert main(["fleet", "up", *options]) == 2
    assert capsys.readouterr().err.startswith(f"triolet: {name} is missing; ")


PROGRAM: Final = """
import json, signal, sys
own = json.loads(sys.stdin.readline())
if {is_broken}:
    print(json.dumps({{"event": "failed", "message": "there is no model"}}))
    sys.exit(2)
signal.signal(signal.SIGTERM, signal.SIG_IGN if {is_deaf} else lambda *_: sys.exit(0))
print(json.dumps({{"event": "server_ready", "url": own["server"]["zone"]}}), flush=True)
sys.stdin.read()
"""
"""Stands for a server: reports its zone as its URL, and exits when its owner's pipe closes."""


def owned(*, is_broken: bool = False, is_deaf: bool = False, retry_s: float = 60) -> OwnedProcess:
    program = PROGRAM.format(is_broken=is_broken, is_deaf=is_deaf)
    grace_s = 0.05 if is_deaf else PATIENCE_S
    settings = replace(
        Settings(),
        server=ServerConfig(drain_timeout_s=grace_s, exit_grace_s=grace_s),
        supervisor=SupervisorConfig(restart_delay_s=0.01, max_restart_delay_s=0.01),
        ray=RayConfig(retry_s=retry_s),
    )
    command = (sys.executable, "-c", program)
    return OwnedProcess("server-a-0", Role.SERVER, settings, "a", "127.0.0.1", command, Starter())


async def wait_ready(process: OwnedProcess, *, other_than: int | None = None) -> int:
    with trio.fail_after(PATIENCE_S):
        while not process.state.is_ready or process.state.pid == other_than:  # noqa: ASYNC110
            await trio.sleep(0.01)
    assert process.state.pid is not None
    return process.state.pid


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_an_owned_process_is_restarted_until_it_is_asked_to_leave(is_deaf: bool) -> None:
    process = owned(is_deaf=is_deaf)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        pid = await wait_ready(process)
        assert process.state == WorkerState(is_ready=True, pid=pid, zone="a", url="a")
        for _ in range(2):
            os.kill(pid, signal.SIGKILL)
            pid = await wait_ready(process, other_than=pid)
        process.leaving.set()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_cannot_start_says_why_and_is_tried_again() -> None:
    process = owned(is_broken=True, retry_s=0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        tried = set[int | None]()
        with trio.fail_after(PATIENCE_S):
            while len(tried) < 3:
                tried |= {process.state.pid} - {None}
                await trio.lowlevel.checkpoint()
            while not process.state.is_stuck:
                await trio.lowlevel.checkpoint()
        assert process.state.trouble == "there is no model"
        process.leaving.set()


OWNER: Final = """
import trio
from tests.ops.test_targets import owned, wait_ready
async def own():
    process = owned()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.run)
        print(await wait_ready(process), flush=True)
trio.run(own)
"""
RAYLET: Final = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
"""


def test_a_process_ends_when_its_owner_loses_its_parent() -> None:
    command = [sys.executable, "-c", RAYLET, OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as raylet:
        assert raylet.stdout is not None
        pid = int(raylet.stdout.readline())
        ended = os.pidfd_open(pid)
        raylet.kill()
        assert select.select([ended], [], [], PATIENCE_S)[0], "an orphan is left"
        os.close(ended)
