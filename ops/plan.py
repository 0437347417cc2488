"""Which processes a local fleet has, where each listens, and how many CPU threads each gets.

Pure: settings and the machine's size in, command lines out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triolet.errors import ConfigError
from triolet.ids import Role

from .arguments import engine_arguments, link_arguments, server_arguments
from .process_spec import ProcessSpec

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.config import EngineConfig, LinkConfig, ServerConfig

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
    """

    model_dir: Path
    server: ServerConfig
    engine: EngineConfig
    link: LinkConfig
    prefill: int
    decode: int
    log_level: str

    def __post_init__(self) -> None:
        for name, count in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not 1 <= count <= MAX_WORKERS:
                raise ConfigError(f"{name} is {count}; allowed: 1 to {MAX_WORKERS}")


def plan_processes(
    plan: FleetPlan, command: tuple[str, ...], directory: Path, supervisor_pid: int, cores: int
) -> list[ProcessSpec]:
    """Return what to start.

    Args:
      plan: the fleet.
      command: program and arguments that mean `triolet`.
      directory: for ipc sockets; private.
      supervisor_pid: whose end ends them all.
      cores: CPU cores that this machine gives us.
    """
    workers = [(Role.PREFILL, i) for i in range(plan.prefill)]
    workers += [(Role.DECODE, i) for i in range(plan.decode)]
    engine = replace(plan.engine, threads=plan.engine.threads or max(1, cores // len(workers)))
    common = [
        *link_arguments(plan.link),
        *("--log-level", plan.log_level),
        *("--supervisor-pid", str(supervisor_pid)),
    ]
    control = {
        role: tuple(f"ipc://{directory}/{r}-{i}.control" for r, i in workers if r is role)
        for role in (Role.PREFILL, Role.DECODE)
    }
    server = replace(
        plan.server,
        model_dir=str(plan.model_dir),
        model_name=plan.server.model_name or plan.model_dir.name,
        prefill_addresses=control[Role.PREFILL],
        decode_addresses=control[Role.DECODE],
    )
    specs = [
        ProcessSpec(
            "server",
            Role.SERVER,
            (*command, "server", str(plan.model_dir), *server_arguments(server), *common),
            _environment(threads=1),
        )
    ]
    for role, i in workers:
        arguments = ["--name", f"{role}-{i}", "--control", control[role][i]]
        if role is Role.DECODE:
            arguments += ["--kv", f"ipc://{directory}/{role}-{i}.kv"]
        arguments += [*engine_arguments(engine), *common]
        specs.append(
            ProcessSpec(
                f"{role}-{i}",
                role,
                (*command, role.value, str(plan.model_dir), *arguments),
                _environment(engine.threads or 1),
            )
        )
    return specs


def _environment(threads: int) -> dict[str, str]:
    """Return what keeps the native libraries of a process to its share of the cores; they read it
    when they are loaded, which is before any option of ours is."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
