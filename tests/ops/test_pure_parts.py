"""Tests of small parts without I/O: sizes, text, plans, arguments and word wrap."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.cli.word_wrap import WordWrap
from ops.models.model_directory import with_pool_share
from ops.models.several import each_model, name_of
from ops.settings.form import Settings, of_role
from ops.settings.sources import SettingSources
from ops.supervisor.placement import VISIBLE_GPUS, gpu_names, own_cores, own_gpus
from ops.supervisor.plan import Door, FleetPlan, ModelPlan, plan_processes
from ops.supervisor.rolling import RollingMove, RollingStep, restart_steps
from triolet.config import (
    ControlledModelConfig,
    EngineConfig,
    FleetConfig,
    FleetModelConfig,
    LendingConfig,
    LocalPrefill,
    Pinning,
    ProcessConfig,
    RoutingConfig,
    ServedModelConfig,
    ServerConfig,
    WorkerConfig,
)
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.plain_text import one_line, printable
from triolet.units import GIB, KIB, MIB, parse_size, show_count, show_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.supervisor.process_spec import ProcessSpec


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("64kib", 64 * KIB),
        ("1048576", MIB),
        ("7B", 7),
    ],
)
def test_sizes_are_understood(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "5 parsecs", "1,5GiB", "0x10", "٣MiBs"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is invalid"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_a_shown_size_is_near_what_was_meant(size: int) -> None:
    assert parse_size(show_size(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (4_877_568, "4.9M"), (8_030_000_000, "8.0B")]
)
def test_counts_read_as_they_are_spoken(count: int, text: str) -> None:
    assert show_count(count) == text


@given(st.text())
def test_foreign_text_becomes_one_harmless_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert "\x1b" not in printable(text)


def plan(prefill: int = 1, decode: int = 1, threads: int | None = None) -> FleetPlan:
    engine = EngineConfig(threads=threads, device="cpu")
    settings = Settings(
        fleet=FleetConfig(prefill=prefill, decode=decode),
        prefill=WorkerConfig(engine=engine),
        decode=WorkerConfig(engine=engine),
        process=ProcessConfig("info"),
    )
    return FleetPlan(settings, (ModelPlan(Path("/models/tiny"), settings),))


def of_models(*names: str, stopped: str = "", **counts: int) -> FleetPlan:
    """Return the plan of a fleet of several models with these numbers of decode workers."""
    models = {
        name: FleetModelConfig(f"/models/{name}", decode=counts.get(name, 1), start=name != stopped)
        for name in names
    }
    settings = replace(plan().settings, models=models)
    plans = [ModelPlan(Path(f"/models/{name_of(own)}"), own) for own in each_model(settings)]
    return FleetPlan(settings, tuple(plans))


def told(spec: ProcessSpec) -> Settings:
    """Return the settings that a process reads from its pipe."""
    sources = SettingSources()
    sources.add_document(spec.settings, "a pipe")
    return sources.settings()


def own(spec: ProcessSpec) -> WorkerConfig:
    return told(spec).worker(spec.role)


def with_settings(fleet: FleetPlan, change: Callable[[Settings], Settings]) -> FleetPlan:
    """Return a plan with changed settings, those of its models too."""
    models = tuple(replace(model, settings=change(model.settings)) for model in fleet.models)
    return replace(fleet, settings=change(fleet.settings), models=models)


def with_fleet(fleet: FleetPlan, **fields: object) -> FleetPlan:
    def change(settings: Settings) -> Settings:
        return replace(settings, fleet=replace(settings.fleet, **fields))  # type: ignore[arg-type]

    return with_settings(fleet, change)


def with_engines(fleet: FleetPlan, **fields: object) -> FleetPlan:
    def change(settings: Settings) -> Settings:
        for role in (Role.PREFILL, Role.DECODE):
            engine = replace(settings.worker(role).engine, **fields)  # type: ignore[arg-type]
            settings = of_role(settings, role, engine=engine)
        return settings

    return with_settings(fleet, change)


def test_a_plan_has_every_process_once_and_each_worker_its_own_sockets() -> None:
    specs, spares = plan_processes(
        plan(2, 3), ("triolet",), Path("/run/x"), 42, range(8), [Door(7)]
    )
    assert not spares
    names = ["server", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [spec.name for spec in specs] == names == plan(2, 3).process_names
    assert [spec.argv for spec in specs] == [
        ("triolet", spec.role.value, "--config", "-") for spec in specs
    ]
    addresses = [own(spec).control_address for spec in specs[1:]]
    addresses += [address for spec in specs[3:] if (address := own(spec).kv_address)]
    addresses += [own(spec).health_address for spec in specs[1:]]
    assert len(set(addresses)) == len(addresses) == 2 * 5 + 3
    server = told(specs[0]).server
    assert {*server.prefill_addresses, *server.decode_addresses} == {
        address for address in addresses if address.endswith(".control")
    }
    assert all(told(spec).process.supervisor_pid == 42 for spec in specs)
    assert all(told(spec).fleet.model == "/models/tiny" for spec in specs)
    assert sum(spec.role is Role.SERVER for spec in specs) == 1


def test_only_the_server_gets_the_socket_that_clients_connect_to() -> None:
    specs, _ = plan_processes(plan(), ("t",), Path("/x"), 1, cores=[0], doors=[Door(7)])
    assert [spec.pass_fds for spec in specs] == [(7,), (), ()]
    assert told(specs[0]).server.listen_fd == 7


def test_the_only_worker_of_its_role_has_a_stand_in_that_the_server_knows_as_such() -> None:
    specs, spares = plan_processes(plan(1, 2), ("t",), Path("/x"), 1, range(8), doors=[Door(7)])
    assert [(spec.name, spec.role) for spec in spares] == [("prefill-spare", Role.PREFILL)]
    server = told(specs[0]).server
    assert server.spare_addresses == (own(spares[0]).control_address,)
    assert server.prefill_addresses == (own(specs[1]).control_address, *server.spare_addresses)


def test_a_model_may_shorten_its_deadline_but_not_prolong_it() -> None:
    models = {"a": FleetModelConfig(deadline_s=5.0), "b": FleetModelConfig(deadline_s=50.0)}
    settings = Settings(server=ServerConfig(default_deadline_s=10.0), models=models)
    assert [own.server.default_deadline_s for own in each_model(settings)] == [5.0, 10.0]
    alone = [ServedModelConfig("a", "/a", default_deadline_s=5.0), ServedModelConfig("b", "/b")]
    server = ServerConfig(default_deadline_s=10.0, models=tuple(alone))
    assert [own.default_deadline_s for own in server.of_models] == [5.0, 10.0]


def test_each_model_has_workers_of_its_own() -> None:
    fleet = of_models("chat", "qwen2.5", chat=2, stopped="qwen2.5")
    specs, spares = plan_processes(fleet, ("t",), Path("/run/x"), 1, range(8), [Door(7)])
    assert [(spec.model, spec.name, told(spec).fleet.model) for spec in (*specs, *spares)] == [
        ("", "server", None),
        ("", "control", None),
        ("chat", "chat.prefill-0", "/models/chat"),
        ("chat", "chat.decode-0", "/models/chat"),
        ("chat", "chat.decode-1", "/models/chat"),
        ("qwen2.5", "qwen2.5.prefill-0", "/models/qwen2.5"),
        ("qwen2.5", "qwen2.5.decode-0", "/models/qwen2.5"),
        ("chat", "chat.prefill-spare", "/models/chat"),
        ("qwen2.5", "qwen2.5.prefill-spare", "/models/qwen2.5"),
        ("qwen2.5", "qwen2.5.decode-spare", "/models/qwen2.5"),
    ]
    assert fleet.process_names == [spec.name for spec in specs[:5]]
    addresses = {spec.name: own(spec).control_address for spec in (*specs[2:], *spares)}
    assert len(set(addresses.values())) == 8
    chat, qwen = told(specs[0]).server.models
    assert (chat.name, chat.model_dir, qwen.name) == ("chat", "/models/chat", "qwen2.5")
    assert chat.prefill_addresses == (
        addresses["chat.prefill-0"],
        addresses["chat.prefill-spare"],
    )
    assert chat.decode_addresses == (addresses["chat.decode-0"], addresses["chat.decode-1"])
    assert chat.spare_addresses == (addresses["chat.prefill-spare"],)
    assert (
        qwen.decode_addresses[-1] == qwen.spare_addresses[-1] == addresses["qwen2.5.decode-spare"]
    )
    assert all(own(spec).name == spec.name for spec in specs[2:])


def test_control_is_told_of_every_model_and_servers_are_told_where_it_is() -> None:
    fleet = of_models("chat", "code", chat=2)
    code = replace(fleet.models[1].settings.models["code"], pinned=True, keep_alive_s=9.0)
    settings = replace(fleet.models[1].settings, models={"code": code})
    settings = of_role(settings, Role.DECODE, engine=EngineConfig(kv_pool_bytes=100))
    fleet = replace(fleet, models=(fleet.models[0], replace(fleet.models[1], settings=settings)))
    specs, _ = plan_processes(fleet, ("t",), Path("/run/x"), 1, range(8), [Door(7)])
    control = told(specs[1]).control
    assert (specs[1].role, control.directory) == (Role.CONTROL, "/run/x")
    assert control.models == (
        ControlledModelConfig("chat", "/models/chat", num_workers=3),
        ControlledModelConfig(
            "code", "/models/code", num_workers=2, pool_bytes=100, pinned=True, keep_alive_s=9.0
        ),
    )
    assert told(specs[0]).server.control_addresses == ("ipc:///run/x/control.sock",)
    specs, _ = plan_processes(plan(), ("t",), Path("/run/x"), 1, range(8), [Door(7)])
    assert Role.CONTROL not in {spec.role for spec in specs}
    assert told(specs[0]).server.control_addresses == ()


def test_sockets_of_models_with_long_names_have_short_paths() -> None:
    fleet = of_models("a" * 63, "b" * 63)
    specs, spares = plan_processes(fleet, ("t",), Path("/" + 79 * "d"), 1, range(8), [Door(7)])
    for worker in map(own, (*specs[2:], *spares)):
        for address in (worker.control_address, worker.kv_address or ""):
            assert len(address.removeprefix("ipc://")) <= 107


def test_the_workers_of_all_models_together_have_a_bound() -> None:
    with pytest.raises(ConfigError, match="2 models have 65 decode workers together; allowed: at "):
        of_models("a", "b", a=64)


def test_the_model_that_nothing_computes_prompts_for_is_named() -> None:
    never = RoutingConfig(LocalPrefill.OFF)
    alone = with_fleet(of_models("a"), prefill=0)
    with pytest.raises(ConfigError, match=r"models\.a\.prefill is 0, and server"):
        with_settings(alone, lambda one: of_role(one, Role.SERVER, routing=never))


ROLES = {Role.SERVER, Role.PREFILL, Role.DECODE}


@pytest.mark.parametrize(
    ("prefill", "decode", "roles", "steps"),
    [
        (
            1,
            2,
            ROLES,
            [
                RollingStep(RollingMove.START_SPARE, "prefill-spare"),
                RollingStep(RollingMove.RESTART, "prefill-0"),
                RollingStep(RollingMove.RETIRE_SPARE, "prefill-spare"),
                RollingStep(RollingMove.RESTART, "decode-0"),
                RollingStep(RollingMove.RESTART, "decode-1"),
                RollingStep(RollingMove.REPLACE, "server"),
            ],
        ),
        (1, 1, {Role.SERVER}, [RollingStep(RollingMove.REPLACE, "server")]),
        (
            2,
            1,
            {Role.PREFILL},
            [RollingStep(RollingMove.RESTART, f"prefill-{n}") for n in range(2)],
        ),
    ],
)
def test_a_restart_never_leaves_a_role_empty(
    prefill: int, decode: int, roles: set[Role], steps: list[RollingStep]
) -> None:
    specs, spares = plan_processes(plan(prefill, decode), ("t",), Path("/x"), 1, [0], [Door(7)])
    assert restart_steps(specs, {(one.model, one.role): one for one in spares}, roles) == steps


@pytest.mark.parametrize(
    ("cores", "workers", "asked", "threads"),
    [(8, (1, 1), None, 4), (2, (1, 1), None, 1), (1, (2, 2), None, 1), (8, (1, 3), 6, 6)],
)
def test_cores_are_divided_among_workers(
    cores: int, workers: tuple[int, int], asked: int | None, threads: int
) -> None:
    fleet = plan(*workers, asked)
    specs, _ = plan_processes(fleet, ("t",), Path("/x"), 1, range(cores), doors=[Door(7)])
    for spec in specs[1:]:
        assert spec.env["OMP_NUM_THREADS"] == str(threads)
        assert own(spec).engine.threads == threads
    assert specs[0].env["OMP_NUM_THREADS"] == "1"


def lenders(fleet: FleetPlan, cores: int) -> dict[str, LendingConfig | None]:
    specs, spares = plan_processes(fleet, ("t",), Path("/x"), 1, range(cores), doors=[Door(7)])
    workers = [spec for spec in (*specs, *spares) if spec.role in (Role.PREFILL, Role.DECODE)]
    return {spec.name: own(spec).lending for spec in workers}


def test_workers_lend_cores_where_they_were_shared_out() -> None:
    assert lenders(plan(1, 2), 6) == {
        "prefill-0": LendingConfig("/x/cores", 0, 3),
        "prefill-spare": LendingConfig("/x/cores", 0, 3),
        "decode-0": LendingConfig("/x/cores", 1, 3),
        "decode-1": LendingConfig("/x/cores", 2, 3),
    }


@pytest.mark.parametrize(
    ("cores", "threads", "places"),
    [(8, 2, (0, 1, 2, 3)), (2, 1, (0, 1, 0, 1)), (3, 1, (0, 1, 2, 0))],
)
def test_workers_of_several_models_share_all_cores(
    cores: int, threads: int, places: tuple[int, ...]
) -> None:
    specs, _ = plan_processes(
        of_models("a", "b"), ("t",), Path("/x"), 1, range(cores), doors=[Door(7)]
    )
    num_places = max(places) + 1
    assert [own(spec).engine.threads for spec in specs[2:]] == [threads] * 4
    assert [own(spec).lending for spec in specs[2:]] == [
        LendingConfig("/x/cores", place, num_places) for place in places
    ]


def test_cores_are_divided_among_the_workers_that_start_with_the_fleet() -> None:
    fleet = of_models("a", "b", stopped="a")
    specs, spares = plan_processes(fleet, ("t",), Path("/x"), 1, range(8), doors=[Door(7)])
    assert {own(spec).engine.threads for spec in specs[2:]} == {4}
    assert lenders(fleet, 8) == {
        spec.name: LendingConfig("/x/cores", int(spec.role is Role.DECODE), 2)
        for spec in (*specs[2:], *spares)
    }


@pytest.mark.parametrize(
    ("fleet", "cores"),
    [
        (plan(1, 1, 1), 2),
        (with_fleet(plan(1, 1), pin=Pinning.AUTO), 4),
        (with_engines(plan(1, 1), device="cuda"), 4),
        (plan(2, 2), 3),
    ],
    ids=["told how many", "pinned", "no CPU", "too few"],
)
def test_nobody_lends_what_was_given_or_is_not_there(fleet: FleetPlan, cores: int) -> None:
    assert set(lenders(fleet, cores).values()) == {None}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"path": 1, "place": 0, "places": 1}'])
def test_lending_that_is_not_understood_is_refused(text: str) -> None:
    sources = SettingSources()
    sources.add_assignments([f"worker.lending={text}"])
    with pytest.raises(ConfigError, match=r"worker\.lending"):
        sources.settings()


def test_decode_workers_get_cores_of_their_own_where_they_are_asked_to() -> None:
    fleet = with_fleet(plan(1, 2, 2), pin=Pinning.AUTO)
    specs, spares = plan_processes(fleet, ("t",), Path("/x"), 1, [1, 2, 4, 5, 6, 9], [Door(7)])
    assert {spec.name: spec.cores for spec in (*specs, *spares)} == {
        "server": (1, 2),
        "prefill-0": (1, 2),
        "prefill-spare": (1, 2),
        "decode-0": (6, 9),
        "decode-1": (4, 5),
    }
    unpinned, _ = plan_processes(plan(1, 2, 2), ("t",), Path("/x"), 1, range(6), [Door(7)])
    assert {spec.cores for spec in unpinned} == {()}


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_nobody_is_pinned_where_no_core_would_be_left_for_the_others(cores: int) -> None:
    assert own_cores(["decode-0", "decode-1"], 2, range(cores)) == {}


@pytest.mark.parametrize(("prefill", "decode"), [(-1, 1), (1, 0), (65, 1), (1, -1)])
def test_a_plan_without_workers_is_refused(prefill: int, decode: int) -> None:
    with pytest.raises(ConfigError, match=r"allowed: [01] to 64"):
        plan(prefill, decode)


def test_decode_alone_is_a_fleet_unless_it_may_compute_no_prompts() -> None:
    alone = plan(0, 1)
    assert [worker.name for worker in alone.workers] == ["decode-0"]
    assert [spare.name for spare in alone.spares] == ["decode-spare"]
    with pytest.raises(ConfigError, match="allowed: 1 to 64"):
        with_settings(
            alone,
            lambda own: of_role(own, Role.SERVER, routing=RoutingConfig(LocalPrefill.OFF)),
        )


WORDS = st.text(st.sampled_from("ab \n"), max_size=60)


@given(st.lists(WORDS, max_size=8), st.integers(1, 12))
def test_wrapping_loses_no_word_and_breaks_none_that_fits(pieces: list[str], width: int) -> None:
    wrap = WordWrap(width)
    shown = "".join(wrap.feed(piece) for piece in pieces) + wrap.finish()
    text = "".join(pieces)
    assert shown.split() == text.split()
    for line in shown.split("\n"):
        for word in re.finditer(r"\S+", line):
            # A terminal begins a new row after every `width` columns.
            is_whole = word.start() // width == (word.end() - 1) // width
            assert is_whole or len(word[0]) > width


def test_words_are_shown_as_soon_as_they_are_whole() -> None:
    wrap = WordWrap(10)
    assert [wrap.feed(piece) for piece in ("Hel", "lo wo", "rld, you")] == [
        "",
        "Hello ",
        "\nworld, ",
    ]
    assert wrap.finish() == "you"


def gpus_of(fleet: FleetPlan, gpus: tuple[str, ...]) -> dict[str, tuple[str | None, str]]:
    """Return the GPU and the device setting of each worker."""
    fleet = replace(fleet, gpus=gpus)
    specs, spares = plan_processes(fleet, ("t",), Path("/x"), 1, range(8), [Door(7)])
    return {
        spec.name: (spec.env.get(VISIBLE_GPUS), own(spec).engine.device)
        for spec in (*specs, *spares)
        if spec.role in (Role.PREFILL, Role.DECODE)
    }


def on_gpu(fleet: FleetPlan, device: str) -> FleetPlan:
    return with_engines(fleet, device=device)


@pytest.mark.parametrize(
    ("fleet", "gpus", "expected"),
    [
        (
            plan(1, 3),
            ("2", "GPU-a"),
            {
                "prefill-0": "2",
                "prefill-spare": "2",
                "decode-0": "GPU-a",
                "decode-1": "2",
                "decode-2": "GPU-a",
            },
        ),
        (
            of_models("a", "b"),
            ("0", "1", "2"),
            {
                "a.prefill-0": "0",
                "a.decode-0": "1",
                "b.prefill-0": "2",
                "b.decode-0": "0",
                "a.prefill-spare": "0",
                "a.decode-spare": "1",
                "b.prefill-spare": "2",
                "b.decode-spare": "0",
            },
        ),
    ],
    ids=["one model", "several models"],
)
def test_workers_are_spread_over_the_gpus(
    fleet: FleetPlan, gpus: tuple[str, ...], expected: dict[str, str]
) -> None:
    seen = gpus_of(on_gpu(fleet, "cuda"), gpus)
    assert seen == {name: (gpu, "cuda") for name, gpu in expected.items()}


def test_a_gpu_that_is_named_is_the_only_one_that_workers_see() -> None:
    seen = gpus_of(on_gpu(plan(1, 2), "cuda:1"), ("0", "1"))
    assert set(seen.values()) == {("1", "cuda")}
    with pytest.raises(ConfigError, match=r"device is 'cuda:2'; allowed: .* cuda:0 to cuda:1"):
        gpus_of(on_gpu(plan(1, 1), "cuda:2"), ("0", "1"))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_where_no_gpu_is_known_workers_are_left_as_they_are(device: str) -> None:
    gpus = ("0",) if device == "cpu" else ()
    assert set(gpus_of(on_gpu(plan(1, 1), device), gpus).values()) == {(None, device)}


def test_gpus_are_those_that_the_environment_leaves() -> None:
    assert gpu_names(None, 3) == ("0", "1", "2")
    assert gpu_names("3, GPU-a,", 8) == ("3", "GPU-a")
    assert gpu_names("", 8) == ()
    assert own_gpus("mps", ["a"], ("0",)) == {}


MIG_LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5c89)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77aa)
  MIG 1g.10gb     Device  0: (UUID: MIG-c6d4)
  MIG 3g.40gb     Device  1: (UUID: MIG-1b5f)
GPU 4: NVIDIA H100 80GB HBM3 (UUID: GPU-of-another-container)
  MIG 1g.10gb     Device  0: (UUID: MIG-not-ours)
"""


def test_each_instance_of_a_divided_gpu_is_a_gpu() -> None:
    assert gpu_names(None, 2, MIG_LISTING) == ("0", "MIG-c6d4", "MIG-1b5f")
    assert gpu_names("MIG-1b5f", 2, MIG_LISTING) == ("MIG-1b5f",)
    assert gpu_names(None, 2, "Failed to initialize NVML\n") == ("0", "1")


@pytest.mark.parametrize(
    ("device", "num_gpus", "share"),
    [("cpu", 0, 0.0625), ("cpu", 4, 0.0625), ("cuda", 4, 0.25), ("cuda:1", 4, 0.0625)],
)
def test_workers_of_one_device_share_the_memory_of_pools(
    device: str, num_gpus: int, share: float
) -> None:
    assert with_pool_share(EngineConfig(device=device), 8, num_gpus).kv_pool_memory_share == share
