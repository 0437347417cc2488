"""Which processes a local fleet has, where each listens, and how many CPU threads each gets.

Pure: settings and the machine's size in, command lines out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from triolet.config import WorkerConfig
from triolet.config_speculation import SpeculationConfig
from triolet.errors import ConfigError
from triolet.ids import Role

from .arguments import (
    engine_arguments,
    gpu_arguments,
    link_arguments,
    server_arguments,
    speculation_arguments,
)
from .process_spec import ProcessSpec

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.config import EngineConfig, LinkConfig, ServerConfig

_WORKER: Final = WorkerConfig("", "", "")
SERVER_NAME = "server"
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
      prefill: how many prefill workers.
      decode: how many decode workers.
      log_level: for every process.
      worker_drain_timeout_s: how long a worker that is restarted may let its sequences finish.
      speculation: how decode workers guess ahead.
    """

    model_dir: Path
    server: ServerConfig
    engine: EngineConfig
    link: LinkConfig
    prefill: int
    decode: int
    log_level: str
    worker_drain_timeout_s: float = _WORKER.drain_timeout_s
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        for name, count in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not 1 <= count <= MAX_WORKERS:
                raise ConfigError(f"{name} is {count}; allowed: 1 to {MAX_WORKERS}")

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
        """Every process that the plan needs, the server first."""
        return [SERVER_NAME, *(name for _, name in self.workers)]

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.server.model_name or self.model_dir.name


def control_address(directory: Path, name: str) -> str:
    """Return where a worker of a local fleet is reached."""
    return f"ipc://{directory}/{name}.control"


def plan_processes(
    plan: FleetPlan,
    command: tuple[str, ...],
    directory: Path,
    supervisor_pid: int,
    cores: int,
    listen_fd: int,
) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
    """Return what to start, and what stands in during restarts.

    Args:
      plan: the fleet.
      command: program and arguments that mean `triolet`.
      directory: for ipc sockets; private.
      supervisor_pid: whose end ends them all.
      cores: CPU cores that this machine gives us.
      listen_fd: the socket that servers accept on, one after the other.
    """
    threads = plan.engine.threads or max(1, cores // len(plan.workers))
    engine = replace(plan.engine, threads=threads)
    common = [
        *link_arguments(plan.link),
        *("--log-level", plan.log_level),
        *("--supervisor-pid", str(supervisor_pid)),
    ]
    every = [*plan.workers, *plan.spares]
    control = {name: control_address(directory, name) for _, name in every}
    server = replace(
        plan.server,
        model_dir=str(plan.model_dir),
        model_name=plan.served_name,
        prefill_addresses=tuple(control[n] for role, n in every if role is Role.PREFILL),
        decode_addresses=tuple(control[n] for role, n in every if role is Role.DECODE),
        spare_addresses=tuple(control[n] for _, n in plan.spares),
        listen_fd=listen_fd,
    )
    server_spec = ProcessSpec(
        SERVER_NAME,
        Role.SERVER,
        (*command, "server", str(plan.model_dir), *server_arguments(server), *common),
        _environment(threads=1),
        pass_fds=(listen_fd,),
    )

    def worker_spec(role: Role, name: str) -> ProcessSpec:
        arguments = ["--name", name, "--control", control[name]]
        if role is Role.DECODE:
            arguments += ["--kv", f"ipc://{directory}/{name}.kv"]
            arguments += speculation_arguments(plan.speculation)
        arguments += ["--drain-timeout", str(plan.worker_drain_timeout_s)]
        arguments += [*engine_arguments(engine), *gpu_arguments(engine.gpu), *common]
        argv = (*command, role.value, str(plan.model_dir), *arguments)
        return ProcessSpec(name, role, argv, _environment(threads))

    workers = [worker_spec(role, name) for role, name in plan.workers]
    return [server_spec, *workers], [worker_spec(role, name) for role, name in plan.spares]


def _environment(threads: int) -> dict[str, str]:
    """Return what keeps the native libraries of a process to its share of the cores; they read it
    when they are loaded, which is before any option of ours is."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
