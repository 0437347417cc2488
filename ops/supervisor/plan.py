"""Which processes a local fleet has, where each listens, and how many CPU threads each gets.

Pure: settings and the machine's size in, processes out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from triolet.config import LendingConfig, LocalPrefill, PeerServersConfig, Pinning
from triolet.errors import ConfigError
from triolet.ids import Role

from ..settings.form import STDIN, Settings, document, of_role
from .placement import GPU, VISIBLE_GPUS, own_cores, own_gpus, placed
from .process_spec import ProcessSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from triolet.config import Dtype

SERVER_NAME = "server"
"""Of the only one; several are numbered."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet on one machine.

    Attributes:
      model_dir: absolute path.
      settings: of every process; addresses and names are filled in here. Workers without `threads`
        get a fair share of the cores.
      gpus: of this machine, as CUDA_VISIBLE_DEVICES names them.
      dtypes: what each kind of worker computes in.
    """

    model_dir: Path
    settings: Settings
    gpus: tuple[str, ...] = ()
    dtypes: Mapping[Role, Dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_off = self.settings.server.routing.local_prefill is LocalPrefill.OFF
        if is_off and self.settings.fleet.prefill == 0:
            raise ConfigError(
                "fleet.prefill is 0, and server.routing.local_prefill is off: nothing computes "
                "prompts; allowed: 1 to 64 prefill workers, or auto or always"
            )

    @property
    def server_names(self) -> list[str]:
        """Of each server."""
        servers = self.settings.fleet.servers
        if servers == 1:
            return [SERVER_NAME]
        return [f"{SERVER_NAME}-{number}" for number in range(servers)]

    @property
    def _counts(self) -> tuple[tuple[Role, int], ...]:
        fleet = self.settings.fleet
        return ((Role.PREFILL, fleet.prefill), (Role.DECODE, fleet.decode))

    @property
    def workers(self) -> list[tuple[Role, str]]:
        """Role and name of each worker."""
        return [(role, f"{role}-{i}") for role, count in self._counts for i in range(count)]

    @property
    def worker_drain_s(self) -> float:
        """The longest time that a worker may take to finish what it runs [s]."""
        return max(self.settings.worker(role).drain_timeout_s for role, _ in self.workers)

    @property
    def spares(self) -> list[tuple[Role, str]]:
        """Role and name of what stands in for the only worker of its role while that is restarted:
        nothing runs there otherwise."""
        return [(role, f"{role}-spare") for role, count in self._counts if count == 1]

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
        own: dict[str, str] = {}
        devices = [self.settings.worker(role).engine.device for role, _ in self.workers]
        for device in dict.fromkeys(devices):
            names = [
                name for (_, name), one in zip(self.workers, devices, strict=True) if one == device
            ]
            own |= own_gpus(device, names, self.gpus)
        of_role = {role: own[name] for role, name in self.workers if name in own}
        return own | {name: of_role[role] for role, name in self.spares if role in of_role}


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
      supervisor_pid: of the process whose end ends them all.
      cores: numbers of the CPU cores that this machine gives us.
      doors: what each server accepts on, its processes one after the other.
    """
    every = [*plan.workers, *plan.spares]
    control = {name: control_address(directory, name) for _, name in every}
    settings = _of_all(plan, control, supervisor_pid)
    loans = _loans(plan, directory, cores)
    paths = tuple((name, str(door_path(directory, name))) for name in plan.server_names)

    def spec(
        name: str, role: Role, own: Settings, env: dict[str, str], fds: tuple[int, ...] = ()
    ) -> ProcessSpec:
        arguments = (role.value, "--config", STDIN)
        argv = (*command, *arguments)
        return ProcessSpec(name, role, argv, env, fds, (), document(own, role), arguments)

    def server_spec(name: str, door: Door) -> ProcessSpec:
        peers = None if door.own_fd is None else PeerServersConfig(name, door.own_fd, paths)
        own = of_role(settings, Role.SERVER, listen_fd=door.listen_fd, peers=peers)
        fds = tuple(fd for fd in door if fd is not None)
        return spec(name, Role.SERVER, own, _environment(threads=1), fds)

    def worker_spec(role: Role, name: str) -> ProcessSpec:
        threads, gpu = _threads(plan, role, cores), plan.own_gpus.get(name)
        engine = settings.worker(role).engine
        device = engine.device if gpu is None else GPU
        own = of_role(
            settings,
            role,
            name=name,
            control_address=control[name],
            kv_address=f"ipc://{directory}/{name}.kv" if role is Role.DECODE else None,
            engine=replace(engine, threads=threads, device=device),
            lending=loans.get(name),
        )
        return spec(name, role, own, _environment(threads, gpu))

    specs = [server_spec(*each) for each in zip(plan.server_names, doors, strict=True)]
    specs += [worker_spec(*worker) for worker in plan.workers]
    spares = [worker_spec(*spare) for spare in plan.spares]
    pinned = _pinned(plan, cores)
    return placed(specs, pinned, cores), placed(spares, pinned, cores)


def _of_all(plan: FleetPlan, control: Mapping[str, str], supervisor_pid: int) -> Settings:
    """Return the settings with what every process is told.

    Args:
      plan: the fleet.
      control: addresses of workers and stand-ins, by name.
      supervisor_pid: of the process whose end ends them all.
    """
    settings = replace(
        plan.settings,
        fleet=replace(plan.settings.fleet, model=str(plan.model_dir)),
        process=replace(plan.settings.process, supervisor_pid=supervisor_pid),
    )
    every = [*plan.workers, *plan.spares]
    return of_role(
        settings,
        Role.SERVER,
        prefill_addresses=tuple(control[n] for role, n in every if role is Role.PREFILL),
        decode_addresses=tuple(control[n] for role, n in every if role is Role.DECODE),
        spare_addresses=tuple(control[n] for _, n in plan.spares),
    )


def _threads(plan: FleetPlan, role: Role, cores: Sequence[int]) -> int:
    """Return the threads of a worker: as many as it was told, or its share of the cores."""
    told = plan.settings.worker(role).engine.threads
    return told or max(1, len(cores) // len(plan.workers))


def _pinned(plan: FleetPlan, cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each process that gets some of its own, by its name."""
    if plan.settings.fleet.pin is Pinning.OFF:
        return {}
    decode_names = [name for role, name in plan.workers if role is Role.DECODE]
    return own_cores(decode_names, _threads(plan, Role.DECODE, cores), cores)


def _loans(plan: FleetPlan, directory: Path, cores: Sequence[int]) -> dict[str, LendingConfig]:
    """Return what each worker is told that lends its cores while it has nothing to compute.

    A worker with a number of threads or with cores of its own uses these and no others. A stand-in
    has the place of the worker that it stands in for: of both one computes.
    """
    num_workers = len(plan.workers)
    engines = [plan.settings.worker(role).engine for role, _ in plan.workers]
    is_told = any(engine.threads is not None for engine in engines)
    is_told = is_told or plan.settings.fleet.pin is not Pinning.OFF
    is_on_cpu = all(engine.device == "cpu" for engine in engines)
    if is_told or not is_on_cpu or num_workers > len(cores):
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
