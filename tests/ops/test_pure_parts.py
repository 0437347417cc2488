"""The small parts that only compute: amounts, text, plans, arguments, wrapped words."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from ops.cli.arguments import (
    engine_arguments,
    gpu_arguments,
    link_arguments,
    server_arguments,
    speculation_arguments,
)
from ops.cli.option_groups import with_groups
from ops.cli.options import (
    engine_options,
    gpu_options,
    link_options,
    read_lending,
    server_options,
    speculation_options,
)
from ops.cli.overload_options import overload_arguments, overload_options
from ops.cli.word_wrap import WordWrap
from ops.plain_text import one_line, printable
from ops.quantities import parse_size, show_count, show_size
from ops.supervisor.placement import VISIBLE_GPUS, Pinning, gpu_names, own_cores, own_gpus
from ops.supervisor.plan import Door, FleetPlan, plan_processes
from ops.supervisor.rolling import Move, Step, restart_steps
from triolet.config import (
    AdmissionConfig,
    BrownoutConfig,
    Dtype,
    EngineConfig,
    GpuConfig,
    GuardConfig,
    KvWire,
    LendingConfig,
    LinkConfig,
    LocalPrefill,
    MemorySharing,
    OverloadConfig,
    QuotaConfig,
    ReasoningParser,
    RoutingConfig,
    ServerConfig,
    SloConfig,
    SpeculationConfig,
    TenantsConfig,
    ToolParser,
    WireConfig,
)
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.units import GIB, KIB, MIB

SERVER = ServerConfig(model_dir="", model_name="", prefill_addresses=(), decode_addresses=())


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
    with pytest.raises(ConfigError, match="is not understood"):
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


CONFIGS = [
    EngineConfig(),
    EngineConfig(
        dtype=Dtype.BFLOAT16,
        backend="flash",
        device="cuda:1",
        block_size=256,
        kv_pool_bytes=3 * GIB + 1,
        max_num_seqs=7,
        max_num_batched_tokens=4096,
        max_model_len=99,
        threads=3,
        prefix_cache=False,
        kv_wire=KvWire.INT8,
        host_cache_bytes=123,
        poison_freed_blocks=True,
    ),
]


def parsed(group: object, name: str, arguments: list[str]) -> object:
    """Return what a command with this group of options makes of arguments."""
    seen: list[object] = []
    app = typer.Typer()

    def command(config: object) -> None:
        seen.append(config)

    command.__annotations__["config"] = object
    app.command()(with_groups(config=group)(command))  # type: ignore[arg-type]
    assert app(args=arguments, prog_name=name, standalone_mode=False) is None
    return seen[0]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_worker_understands_the_engine_that_its_supervisor_means(config: EngineConfig) -> None:
    assert parsed(engine_options, "prefill", engine_arguments(config)) == config


@pytest.mark.parametrize("config", [GpuConfig(), GpuConfig(False, True, 5 * GIB)])
def test_a_worker_understands_the_gpu_that_its_supervisor_means(config: GpuConfig) -> None:
    assert parsed(gpu_options, "prefill", gpu_arguments(config)) == config
    with pytest.raises(ConfigError, match="pinned_bytes is 0; allowed: >= 1"):
        GpuConfig(pinned_bytes=0)


@pytest.mark.parametrize("source", ["off", "lookup", "draft"])
def test_decode_understands_the_guessing_that_its_supervisor_means(
    source: str, tmp_path: Path
) -> None:
    if source == "draft":
        (tmp_path / "config.json").touch()
        source = str(tmp_path)
    config = SpeculationConfig(source=source, max_guesses=3, max_step_tokens=7)
    assert parsed(speculation_options, "decode", speculation_arguments(config)) == config
    assert config.draft_dir == (source if "/" in source else None)


def test_a_source_of_guesses_that_is_none_is_refused(tmp_path: Path) -> None:
    for source in ("sideways", "", str(tmp_path)):
        with pytest.raises(ConfigError, match="off, lookup, or the directory of a draft model"):
            speculation_options(speculate=source)


def test_every_role_understands_the_links_that_its_supervisor_means() -> None:
    wire = WireConfig(MemorySharing.ON, layer_groups=3, layer_group_min_tokens=99)
    config = LinkConfig(peer_timeout_s=2.5, progress_timeout_s=9.0, lease_ttl_s=4.0, wire=wire)
    assert parsed(link_options, "decode", link_arguments(config)) == config


@pytest.mark.parametrize(
    "config",
    [
        SERVER,
        ServerConfig(
            model_dir="",
            model_name="tiny",
            prefill_addresses=(),
            decode_addresses=(),
            host="::",
            port=0,
            allow_remote_clients=True,
            tenants=TenantsConfig(
                "/etc/triolet/tenants.toml",
                quotas=QuotaConfig(
                    "@/etc/triolet/redis",
                    spend_file="/var/lib/spend.sqlite3",
                    call_timeout_s=0.25,
                ),
            ),
            token_window=3,
            stall_timeout_s=2.0,
            drain_timeout_s=0.5,
            tool_parser=ToolParser.GRANITE,
            max_queued_requests=9,
            max_connections=11,
            allow_origins=("https://app.example", "*"),
            metrics_compat="none",
            reasoning_parser=ReasoningParser.DEEPSEEK_R1,
        ),
    ],
)
def test_a_server_understands_what_its_supervisor_means(config: ServerConfig) -> None:
    assert parsed(server_options, "server", server_arguments(config)) == config


@pytest.mark.parametrize("is_on", [True, False])
def test_a_server_understands_what_its_supervisor_means_of_overload(is_on: bool) -> None:
    config = OverloadConfig(
        SloConfig(critical_s=1.0, default_s=2.5, sheddable_s=1.5),
        AdmissionConfig(is_on=is_on),
        BrownoutConfig(is_on=not is_on),
        GuardConfig(is_on=is_on),
    )
    assert parsed(overload_options, "server", overload_arguments(config)) == config


def plan(prefill: int = 1, decode: int = 1, threads: int | None = None) -> FleetPlan:
    return FleetPlan(
        model_dir=Path("/models/tiny"),
        server=SERVER,
        engine=EngineConfig(threads=threads),
        link=LinkConfig(),
        prefill=prefill,
        decode=decode,
        log_level="info",
    )


def test_a_plan_has_every_process_once_and_each_worker_its_own_sockets() -> None:
    specs, spares = plan_processes(
        plan(2, 3), ("triolet",), Path("/run/x"), 42, range(8), [Door(7)]
    )
    assert not spares
    names = ["server", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [spec.name for spec in specs] == names == plan(2, 3).process_names
    assert [spec.argv[:2] for spec in specs] == [("triolet", spec.role.value) for spec in specs]
    own = [a for spec in specs[1:] for a in spec.argv if a.startswith("ipc://")]
    assert len(set(own)) == len(own) == 2 + 2 * 3
    named_by_server = {a for a in specs[0].argv if a.startswith("ipc://")}
    assert named_by_server == {a for a in own if a.endswith(".control")}
    assert all(spec.argv[-2:] == ("--supervisor-pid", "42") for spec in specs)
    assert sum(spec.role is Role.SERVER for spec in specs) == 1


def test_only_the_server_gets_the_socket_that_clients_connect_to() -> None:
    specs, _ = plan_processes(plan(), ("t",), Path("/x"), 1, cores=[0], doors=[Door(7)])
    assert [spec.pass_fds for spec in specs] == [(7,), (), ()]
    assert specs[0].argv[specs[0].argv.index("--listen-fd") + 1] == "7"


def test_the_only_worker_of_its_role_has_a_stand_in_that_the_server_knows_as_such() -> None:
    specs, spares = plan_processes(plan(1, 2), ("t",), Path("/x"), 1, range(8), doors=[Door(7)])
    assert [(spec.name, spec.role) for spec in spares] == [("prefill-spare", Role.PREFILL)]
    address = spares[0].argv[spares[0].argv.index("--control") + 1]
    server = specs[0].argv
    assert server[server.index("--spare-prefill") + 1] == address
    assert server.count(address) == 1
    assert "--spare-decode" not in server
    ordinary = [argument for argument in server if argument.startswith("--prefill")]
    assert ordinary == ["--prefill"]


ROLES = {Role.SERVER, Role.PREFILL, Role.DECODE}


@pytest.mark.parametrize(
    ("prefill", "decode", "roles", "steps"),
    [
        (
            1,
            2,
            ROLES,
            [
                Step(Move.START_SPARE, "prefill-spare"),
                Step(Move.RESTART, "prefill-0"),
                Step(Move.RETIRE_SPARE, "prefill-spare"),
                Step(Move.RESTART, "decode-0"),
                Step(Move.RESTART, "decode-1"),
                Step(Move.REPLACE, "server"),
            ],
        ),
        (1, 1, {Role.SERVER}, [Step(Move.REPLACE, "server")]),
        (2, 1, {Role.PREFILL}, [Step(Move.RESTART, f"prefill-{n}") for n in range(2)]),
    ],
)
def test_a_restart_never_leaves_a_role_empty(
    prefill: int, decode: int, roles: set[Role], steps: list[Step]
) -> None:
    specs, spares = plan_processes(plan(prefill, decode), ("t",), Path("/x"), 1, [0], [Door(7)])
    assert restart_steps(specs, {spec.role: spec for spec in spares}, roles) == steps


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
        assert spec.argv[spec.argv.index("--threads") + 1] == str(threads)
    assert specs[0].env["OMP_NUM_THREADS"] == "1"


def lenders(fleet: FleetPlan, cores: int) -> dict[str, LendingConfig | None]:
    specs, spares = plan_processes(fleet, ("t",), Path("/x"), 1, range(cores), doors=[Door(7)])
    told = {spec.name: dict(pairwise(spec.argv)).get("--lending") for spec in (*specs, *spares)}
    return {name: read_lending(text) for name, text in told.items() if name != "server"}


def test_workers_lend_cores_where_they_were_shared_out() -> None:
    assert lenders(plan(1, 2), 6) == {
        "prefill-0": LendingConfig("/x/cores", 0, 3),
        "prefill-spare": LendingConfig("/x/cores", 0, 3),
        "decode-0": LendingConfig("/x/cores", 1, 3),
        "decode-1": LendingConfig("/x/cores", 2, 3),
    }


@pytest.mark.parametrize(
    ("fleet", "cores"),
    [
        (plan(1, 1, 1), 2),
        (replace(plan(1, 1), pin=Pinning.AUTO), 4),
        (replace(plan(1, 1), engine=EngineConfig(device="cuda")), 4),
        (plan(2, 2), 3),
    ],
    ids=["told how many", "pinned", "no CPU", "too few"],
)
def test_nobody_lends_what_was_given_or_is_not_there(fleet: FleetPlan, cores: int) -> None:
    assert set(lenders(fleet, cores).values()) == {None}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"path": 1, "place": 0, "places": 1}'])
def test_lending_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lending is for supervisors"):
        read_lending(text)


def test_decode_workers_get_cores_of_their_own_where_they_are_asked_to() -> None:
    fleet = replace(plan(1, 2, 2), pin=Pinning.AUTO)
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
    assert [name for _, name in alone.workers] == ["decode-0"]
    assert [name for _, name in alone.spares] == ["decode-spare"]
    never = replace(alone.server, routing=RoutingConfig(LocalPrefill.OFF))
    with pytest.raises(ConfigError, match="allowed: 1 to 64"):
        replace(alone, server=never)


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
    """Return the GPU that each worker sees, and the device that it is told."""
    fleet = replace(fleet, gpus=gpus)
    specs, spares = plan_processes(fleet, ("t",), Path("/x"), 1, range(8), [Door(7)])
    return {
        spec.name: (spec.env.get(VISIBLE_GPUS), spec.argv[spec.argv.index("--device") + 1])
        for spec in (*specs, *spares)
        if spec.role is not Role.SERVER
    }


def on_gpu(fleet: FleetPlan, device: str) -> FleetPlan:
    return replace(fleet, engine=replace(fleet.engine, device=device))


def test_workers_are_spread_over_the_gpus() -> None:
    assert gpus_of(on_gpu(plan(1, 3), "cuda"), ("2", "GPU-a")) == {
        "prefill-0": ("2", "cuda"),
        "prefill-spare": ("2", "cuda"),
        "decode-0": ("GPU-a", "cuda"),
        "decode-1": ("2", "cuda"),
        "decode-2": ("GPU-a", "cuda"),
    }


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
