"""Which processes a local fleet has, where each listens, and how many CPU threads each gets.

Pure: settings and the machine's size in, command lines out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.config import (
    LendingConfig,
    LocalPrefill,
    SiblingConfig,
    SpeculationConfig,
    WorkerConfig,
)
from triolet.errors import ConfigError
from triolet.ids import Role

from ..cli.arguments import (
    engine_arguments,
    gpu_arguments,
    lending_arguments,
    link_arguments,
    speculation_arguments,
)
from ..cli.overload_options import front_arguments
from .placement import GPU, VISIBLE_GPUS, Pinning, own_cores, own_gpus, placed
from .process_spec import ProcessSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from triolet.config import EngineConfig, LinkConfig, ServerConfig

_WORKER: Final = WorkerConfig("", "", "")
SERVER_NAME = "server"
"""Of the only one; several are numbered."""
MAX_SERVERS = 16
"""Of one port: a front takes a core for tens of thousands of tokens a second."""
MAX_WORKERS = 64
"""Of one role on one machine: far above what its cores can use, far below what ports and files
allow; a larger number is a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet on one machine.

    Attributes:
      model_dir: absolute path.
      server: settings of the one server; its model and addresses are filled in here.
      engine: settings of every worker; no `threads` means a fair share of the cores.
      link: settings of every process.
      servers: how many share the port.
      prefill: how many prefill workers; with none decode computes prompts itself.
      decode: how many decode workers.
      log_level: for every process.
      worker_drain_timeout_s: how long a worker that is restarted may let its sequences finish.
      speculation: how decode workers guess ahead.
      pin: whether decode workers get cores of their own.
      gpus: of this machine, as CUDA_VISIBLE_DEVICES names them.
    """

    model_dir: Path
    server: ServerConfig
    engine: EngineConfig
    link: LinkConfig
    prefill: int
    decode: int
    log_level: str
    servers: int = 1
    worker_drain_timeout_s: float = _WORKER.drain_timeout_s
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    pin: Pinning = Pinning.OFF
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least_prefill = int(self.server.routing.local_prefill is LocalPrefill.OFF)
        for name, count, least, most in (
            ("--servers", self.servers, 1, MAX_SERVERS),
            ("--prefill", self.prefill, least_prefill, MAX_WORKERS),
            ("--decode", self.decode, 1, MAX_WORKERS),
        ):
            if not least <= count <= most:
                raise ConfigError(f"{name} is {count}; allowed: {least} to {most}")

    @property
    def server_names(self) -> list[str]:
        """Of each server."""
        if self.servers == 1:
            return [SERVER_NAME]
        return [f"{SERVER_NAME}-{number}" for number in range(self.servers)]

    @property
    def workers(self) -> list[tuple[Role, str]]:
        """Role and name of each worker."""
        return [
            (role, f"{role}-{i}")
            for role, count in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
            for i in range(count)
        ]

    @property
    def spares(self) -> list[tuple[Role, str]]:
        """Role and name of what stands in for the only worker of its role while that is restarted:
        nothing runs there otherwise."""
        roles = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return [(role, f"{role}-spare") for role, count in roles if count == 1]

    @property
    def process_names(self) -> list[str]:
        """Every process that the plan needs, the servers first."""
        return [*self.server_names, *(name for _, name in self.workers)]

    @property
    def own_gpus(self) -> dict[str, str]:
        """The one GPU of each worker, where GPUs are dealt out. A stand-in has that of the worker
        that it stands in for.

        Raises:
          ConfigError: the device is a GPU that is not there.
        """
        own = own_gpus(self.engine.device, [name for _, name in self.workers], self.gpus)
        of_role = {role: own[name] for role, name in self.workers if name in own}
        return own | {name: of_role[role] for role, name in self.spares if role in of_role}

    @property
    def worker_device(self) -> str:
        """The device as each worker sees it: of its one GPU the number is 0."""
        return GPU if self.own_gpus else self.engine.device

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.server.model_name or self.model_dir.name


def control_address(directory: Path, name: str) -> str:
    """Return where a worker of a local fleet is reached."""
    return f"ipc://{directory}/{name}.control"


class Door(NamedTuple):
    """The sockets of one server, which outlive each of its processes.

    Attributes:
      listen_fd: of the port that clients connect to.
      own_fd: of its own Unix socket; None where it is the only server.
    """

    listen_fd: int
    own_fd: int | None = None


def door_path(directory: Path, name: str) -> Path:
    """Return where one of several servers is reached."""
    return directory / f"{name}.http"


def plan_processes(
    plan: FleetPlan,
    command: tuple[str, ...],
    directory: Path,
    supervisor_pid: int,
    cores: Sequence[int],
    doors: Sequence[Door],
) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
    """Return what to start, and what stands in during restarts.

    Args:
      plan: the fleet.
      command: program and arguments that mean `triolet`.
      directory: for ipc sockets; private.
      supervisor_pid: whose end ends them all.
      cores: numbers of the CPU cores that this machine gives us.
      doors: what each server accepts on, its processes one after the other.
    """
    threads = plan.engine.threads or max(1, len(cores) // len(plan.workers))
    engine = replace(plan.engine, threads=threads, device=plan.worker_device)
    common = [*link_arguments(plan.link), "--log-level", plan.log_level]
    common += ["--supervisor-pid", str(supervisor_pid)]
    every = [*plan.workers, *plan.spares]
    control = {name: control_address(directory, name) for _, name in every}
    server = replace(
        plan.server,
        model_dir=str(plan.model_dir),
        model_name=plan.served_name,
        prefill_addresses=tuple(control[n] for role, n in every if role is Role.PREFILL),
        decode_addresses=tuple(control[n] for role, n in every if role is Role.DECODE),
        spare_addresses=tuple(control[n] for _, n in plan.spares),
    )
    loans = _loans(plan, directory, threads, cores)
    paths = tuple((name, str(door_path(directory, name))) for name in plan.server_names)

    def server_spec(name: str, door: Door) -> ProcessSpec:
        siblings = None if door.own_fd is None else SiblingConfig(name, door.own_fd, paths)
        own = replace(server, listen_fd=door.listen_fd, siblings=siblings)
        return ProcessSpec(
            name,
            Role.SERVER,
            (*command, "server", str(plan.model_dir), *front_arguments(own), *common),
            _environment(threads=1),
            pass_fds=tuple(fd for fd in door if fd is not None),
        )

    def worker_spec(role: Role, name: str) -> ProcessSpec:
        arguments = ["--name", name, "--control", control[name]]
        if role is Role.DECODE:
            arguments += ["--kv", f"ipc://{directory}/{name}.kv"]
            arguments += speculation_arguments(plan.speculation)
        arguments += [*_of_every_worker(plan, engine), *lending_arguments(loans.get(name)), *common]
        argv = (*command, role.value, str(plan.model_dir), *arguments)
        return ProcessSpec(name, role, argv, _environment(threads, plan.own_gpus.get(name)))

    specs = [server_spec(*each) for each in zip(plan.server_names, doors, strict=True)]
    specs += [worker_spec(*worker) for worker in plan.workers]
    spares = [worker_spec(*spare) for spare in plan.spares]
    pinned = _pinned(plan, threads, cores)
    return placed(specs, pinned, cores), placed(spares, pinned, cores)


def _pinned(plan: FleetPlan, threads: int, cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each process that gets some of its own, by its name."""
    if plan.pin is Pinning.OFF:
        return {}
    decode_names = [name for role, name in plan.workers if role is Role.DECODE]
    return own_cores(decode_names, threads, cores)


def _of_every_worker(plan: FleetPlan, engine: EngineConfig) -> list[str]:
    drain = ["--drain-timeout", str(plan.worker_drain_timeout_s)]
    return [*drain, *engine_arguments(engine), *gpu_arguments(engine.gpu)]


def _loans(
    plan: FleetPlan, directory: Path, threads: int, cores: Sequence[int]
) -> dict[str, LendingConfig]:
    """Return what each worker is told that lends its cores while it has nothing to compute.

    Who was told how many threads to use, or got cores of its own, uses these and no others. A
    stand-in has the place of the worker that it stands in for: of both one computes.
    """
    num_workers = len(plan.workers)
    is_told = plan.engine.threads is not None or plan.pin is not Pinning.OFF
    if is_told or plan.engine.device != "cpu" or num_workers * threads > len(cores):
        return {}
    places = {name: place for place, (_, name) in enumerate(plan.workers)}
    of_role = {role: places[name] for role, name in plan.workers}
    places |= {name: of_role[role] for role, name in plan.spares}
    path = str(directory / "cores")
    return {name: LendingConfig(path, place, num_workers) for name, place in places.items()}


def _environment(threads: int, gpu: str | None = None) -> dict[str, str]:
    """Return what keeps the native libraries of a process to its share of the cores and to its
    GPU; they read it when they are loaded, which is before any option of ours is."""
    own_gpu = {} if gpu is None else {VISIBLE_GPUS: gpu}
    return own_gpu | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
