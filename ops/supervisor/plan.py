"""Plans the processes of a local fleet: their names, addresses, CPU threads, cores and GPUs.

No I/O: takes settings and the machine's size, returns process specifications.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from transport.control_protocol import CONTROL_SOCKET
from triolet.config import (
    MAX_WORKERS,
    ControlledModelConfig,
    LendingConfig,
    LocalPrefill,
    PeerServersConfig,
    Pinning,
    ServedModelConfig,
)
from triolet.errors import ConfigError
from triolet.ids import Role

from ..settings.form import STDIN, Settings, document, of_role
from .placement import GPU, VISIBLE_GPUS, own_cores, own_gpus, placed
from .process_spec import ProcessSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from triolet.config import Dtype, EngineConfig, ProcessConfig

SERVER_NAME = "server"
"""Name of a single server; several servers are numbered."""
CONTROL_NAME = "control"


class PlannedWorker(NamedTuple):
    """A worker of a fleet, or a spare.

    Attributes:
      model: index of its model in the fleet.
      role: prefill or decode.
      name: name in logs, metrics and commands.
      file: prefix of its socket names; short, because socket paths are limited in length.
    """

    model: int
    role: Role
    name: str
    file: str


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model of a fleet.

    Attributes:
      model_dir: absolute path of the model.
      settings: settings of its workers, and of a server as if this were its only model.
      dtypes: dtype of each worker role.
      number: number in its socket names; None for its index in the fleet.
      adapter_bytes: memory of the adapters in one worker of each role.
      workers_of: the version with the same compute digest that has its workers; empty if it has its
        own.
    """

    model_dir: Path
    settings: Settings
    dtypes: Mapping[Role, Dtype] = field(default_factory=dict)
    adapter_bytes: Mapping[Role, int] = field(default_factory=dict)
    number: int | None = None
    workers_of: str = ""

    @property
    def name(self) -> str:
        """Name of the model and prefix of its worker names; empty for a single unnamed model."""
        return next(iter(self.settings.models), "")

    @property
    def starts(self) -> bool:
        """Whether its workers start with the fleet."""
        return all(model.start for model in self.settings.models.values())

    @property
    def counts(self) -> tuple[tuple[Role, int], ...]:
        """Number of its own workers of each role."""
        if self.workers_of:
            return ((Role.PREFILL, 0), (Role.DECODE, 0))
        fleet = self.settings.fleet
        return ((Role.PREFILL, fleet.prefill), (Role.DECODE, fleet.decode))


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet on one machine.

    Attributes:
      settings: settings of all processes, without addresses and names. Workers without `threads`
        get an equal share of the cores.
      models: at least one model; an unnamed model is the only one.
      gpus: GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.
      lends: whether workers may lend each other cores.
    """

    settings: Settings
    models: tuple[ModelPlan, ...]
    gpus: tuple[str, ...] = ()
    lends: bool = True

    def __post_init__(self) -> None:
        is_off = self.settings.server.routing.local_prefill is LocalPrefill.OFF
        for model in self.models:
            if is_off and model.settings.fleet.prefill == 0:
                field = f"models.{model.name}.prefill" if model.name else "fleet.prefill"
                raise ConfigError(
                    f"{field} is 0, and server.routing.local_prefill is off: no worker computes "
                    "prompts; allowed: 1 to 64 prefill workers, or local_prefill=auto or always"
                )
        for role in (Role.PREFILL, Role.DECODE):
            count = sum(worker.role is role for worker in self.workers)
            if count > MAX_WORKERS:
                raise ConfigError(
                    f"{len(self.models)} models have {count} {role} workers together; allowed: at "
                    f"most {MAX_WORKERS}; set models.NAME.{role} to fewer"
                )

    @property
    def server_names(self) -> list[str]:
        """Names of the servers."""
        servers = self.settings.fleet.servers
        if servers == 1:
            return [SERVER_NAME]
        return [f"{SERVER_NAME}-{number}" for number in range(servers)]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Public name of each model."""
        return tuple(model.name or model.settings.server.model_name for model in self.models)

    @property
    def workers(self) -> list[PlannedWorker]:
        """All workers of all models."""
        return [
            self._worker(place, role, str(number))
            for place, model in enumerate(self.models)
            for role, count in model.counts
            for number in range(count)
        ]

    @property
    def spares(self) -> list[PlannedWorker]:
        """Spares, one for each model and role with a single worker. A spare runs only while that
        worker restarts."""
        return [
            self._worker(place, role, "spare")
            for place, model in enumerate(self.models)
            for role, count in model.counts
            if count == 1
        ]

    def _worker(self, place: int, role: Role, last: str) -> PlannedWorker:
        own, name = f"{role}-{last}", self.models[place].name
        told = self.models[place].number
        number = place if told is None else told
        return (
            PlannedWorker(place, role, f"{name}.{own}", f"m{number}.{own}")
            if name
            else PlannedWorker(place, role, own, own)
        )

    @property
    def starting(self) -> list[PlannedWorker]:
        """Workers that start with the fleet."""
        return [worker for worker in self.workers if self.models[worker.model].starts]

    @property
    def has_control(self) -> bool:
        """Whether the fleet has a control process: if its models have names."""
        return bool(self.models[0].name)

    @property
    def worker_drain_s(self) -> float:
        """Longest drain timeout of any worker [s]."""
        roles = {worker.role for worker in self.workers}
        return max(self.settings.worker(role).drain_timeout_s for role in roles)

    @property
    def process_names(self) -> list[str]:
        """Names of all processes that start with the fleet, servers first."""
        control = [CONTROL_NAME] * self.has_control
        return [*self.server_names, *control, *(worker.name for worker in self.starting)]

    def with_count(self, place: int, role: Role, count: int) -> FleetPlan:
        """Return the plan with another number of workers of a model and role.

        Args:
          place: index of the model.
          role: role of the workers.
          count: number of workers.

        Raises:
          ConfigError: too many or too few workers.
        """
        settings = self.models[place].settings
        is_prefill = role is Role.PREFILL
        fleet = (
            replace(settings.fleet, prefill=count)
            if is_prefill
            else replace(settings.fleet, decode=count)
        )
        model = replace(self.models[place], settings=replace(settings, fleet=fleet))
        # Running workers have divided the cores by the old number, so new ones have no slot.
        models = (*self.models[:place], model, *self.models[place + 1 :])
        return replace(self, models=models, lends=False)

    def with_models(self, models: Sequence[ModelPlan]) -> FleetPlan:
        """Return the plan with other models (at least one). Running workers keep their cores, which
        are not lent if the set of workers changes.

        Raises:
          ConfigError: too many workers.
        """
        named = {model.name: model.settings.models[model.name] for model in models}
        settings = replace(self.settings, models=named)
        plan = replace(self, settings=settings, models=tuple(models), lends=False)
        is_same = [one.name for one in plan.workers] == [one.name for one in self.workers]
        return replace(plan, lends=self.lends and is_same)

    def engine(self, worker: PlannedWorker) -> EngineConfig:
        """Return the engine settings of a worker."""
        return self.models[worker.model].settings.worker(worker.role).engine

    def places(self, num_places: int) -> dict[str, int]:
        """Return a slot number for each worker and spare by name, in turn. Workers that start with
        the fleet come first. A spare has the slot of its worker.

        Args:
          num_places: number of slots; more workers share them.
        """
        ordered = sorted(self.workers, key=lambda one: not self.models[one.model].starts)
        own = {one.name: place % num_places for place, one in enumerate(ordered)}
        return own | {spare.name: own[self._origin(spare).name] for spare in self.spares}

    def _origin(self, spare: PlannedWorker) -> PlannedWorker:
        """Return the worker that a spare replaces during its restart."""
        return next(
            one for one in self.workers if (one.model, one.role) == (spare.model, spare.role)
        )

    @property
    def own_gpus(self) -> dict[str, str]:
        """GPU of each worker, if GPUs are assigned. A spare has the GPU of its worker.

        Raises:
          ConfigError: the GPU does not exist.
        """
        own: dict[str, str] = {}
        devices = {worker.name: self.engine(worker).device for worker in self.workers}
        for device in dict.fromkeys(devices.values()):
            names = [name for name, one in devices.items() if one == device]
            own |= own_gpus(device, names, self.gpus)
        origins = {spare.name: self._origin(spare).name for spare in self.spares}
        return own | {name: own[origin] for name, origin in origins.items() if origin in own}


def control_address(directory: Path, worker: PlannedWorker) -> str:
    """Return the control address of a worker of a local fleet."""
    return f"ipc://{directory}/{worker.file}.control"


class Door(NamedTuple):
    """Listening sockets of one server; they outlive its processes.

    Attributes:
      listen_fd: file descriptor of the clients' port.
      own_fd: file descriptor of its own Unix socket; None for a single server.
    """

    listen_fd: int
    own_fd: int | None = None


def door_path(directory: Path, name: str) -> Path:
    """Return the path of the Unix socket of one of several servers."""
    return directory / f"{name}.http"


def plan_processes(
    plan: FleetPlan,
    command: tuple[str, ...],
    directory: Path,
    supervisor_pid: int,
    cores: Sequence[int],
    doors: Sequence[Door],
) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
    """Return the processes to start, and the spares.

    Args:
      plan: the fleet.
      command: program and arguments that run `triolet`.
      directory: private directory for ipc sockets.
      supervisor_pid: process id of the supervisor; the processes exit when it ends.
      cores: CPU cores that this process may use.
      doors: listening sockets of each server.
    """
    control = {one.name: control_address(directory, one) for one in (*plan.workers, *plan.spares)}
    loans = _loans(plan, directory, cores)
    gpus = plan.own_gpus
    paths = tuple((name, str(door_path(directory, name))) for name in plan.server_names)
    servers = _of_servers(plan, control, directory)
    process = replace(plan.settings.process, supervisor_pid=supervisor_pid)
    spec = partial(_process, command, process)

    def server_spec(name: str, door: Door) -> ProcessSpec:
        peers = None if door.own_fd is None else PeerServersConfig(name, door.own_fd, paths)
        own = of_role(servers, Role.SERVER, listen_fd=door.listen_fd, peers=peers)
        fds = tuple(fd for fd in door if fd is not None)
        return spec(name, Role.SERVER, own, _environment(threads=1), fds)

    def worker_spec(worker: PlannedWorker) -> ProcessSpec:
        model, role, name = plan.models[worker.model], worker.role, worker.name
        threads, gpu = worker_threads(plan, role, cores), gpus.get(name)
        engine = plan.engine(worker)
        device = engine.device if gpu is None else GPU
        own = of_role(
            _with_model(model.settings, model),
            role,
            name=name,
            control_address=control[name],
            kv_address=f"ipc://{directory}/{worker.file}.kv" if role is Role.DECODE else None,
            health_address=f"ipc://{directory}/{worker.file}.health",
            engine=replace(engine, threads=threads, device=device),
            lending=loans.get(name),
        )
        return spec(name, role, own, _environment(threads, gpu), model=model.name)

    specs = [server_spec(*each) for each in zip(plan.server_names, doors, strict=True)]
    if plan.has_control:
        own = _of_control(plan, directory)
        specs.append(spec(CONTROL_NAME, Role.CONTROL, own, _environment(threads=1)))
    specs += [worker_spec(worker) for worker in plan.workers]
    spares = [worker_spec(spare) for spare in plan.spares]
    pinned = _pinned(plan, cores)
    return placed(specs, pinned, cores), placed(spares, pinned, cores)


def _process(
    command: tuple[str, ...],
    process: ProcessConfig,
    name: str,
    role: Role,
    own: Settings,
    env: dict[str, str],
    fds: tuple[int, ...] = (),
    model: str = "",
) -> ProcessSpec:
    arguments = (role.value, "--config", STDIN)
    argv = (*command, *arguments)
    told = document(replace(own, process=process), role)
    return ProcessSpec(name, role, argv, env, fds, (), told, arguments, model)


def _with_model(settings: Settings, model: ModelPlan) -> Settings:
    return replace(settings, fleet=replace(settings.fleet, model=str(model.model_dir)))


def _of_servers(plan: FleetPlan, control: Mapping[str, str], directory: Path) -> Settings:
    """Return the settings of servers, with the models and the addresses of their workers.

    Args:
      plan: the fleet.
      control: addresses of workers and spares by name.
      directory: private directory of the fleet.
    """
    models = tuple(served_model(plan, place, control) for place in range(len(plan.models)))
    if plan.has_control:
        own = (_control_address(directory),)
        return of_role(plan.settings, Role.SERVER, models=models, control_addresses=own)
    (only,) = models
    return of_role(
        _with_model(plan.settings, plan.models[0]),
        Role.SERVER,
        prefill_addresses=only.prefill_addresses,
        decode_addresses=only.decode_addresses,
        spare_addresses=only.spare_addresses,
    )


def _control_address(directory: Path) -> str:
    """Return the address at which control listens for servers."""
    return f"ipc://{directory / CONTROL_SOCKET}"


def _of_control(plan: FleetPlan, directory: Path) -> Settings:
    """Return the settings of control, with the models."""
    models = tuple(controlled(model) for model in plan.models)
    control = replace(
        plan.settings.control,
        directory=str(directory),
        address=_control_address(directory),
        models=models,
        members_poll_s=plan.settings.server.members_poll_s,
        server_drain_s=plan.settings.server.drain_timeout_s,
        objectives=plan.settings.server.objectives,
        usage_dir=plan.settings.server.usage.directory,
        store=plan.settings.fleet.store,
    )
    return replace(plan.settings, control=control)


def controlled(model: ModelPlan) -> ControlledModelConfig:
    """Return control's config of a model."""
    own = model.settings.models[model.name]
    pools = [
        count * (model.settings.worker(role).engine.kv_pool_bytes or 0)
        for role, count in model.counts
    ]
    return ControlledModelConfig(
        name=model.name,
        model_dir=str(model.model_dir),
        digest=model.settings.server.model_digest,
        num_workers=sum(count for _, count in model.counts),
        pool_bytes=sum(pools),
        adapter_bytes=sum(count * model.adapter_bytes.get(role, 0) for role, count in model.counts),
        adapters={one.name: one.digest for one in model.settings.server.model_adapters},
        workers_of=model.workers_of,
        pinned=own.pinned,
        keep_alive_s=own.keep_alive_s,
    )


def served_model(plan: FleetPlan, place: int, control: Mapping[str, str]) -> ServedModelConfig:
    """Return the servers' config of a model.

    Args:
      plan: the fleet.
      place: index of the model.
      control: addresses of workers and spares by name.
    """
    model = plan.models[place]
    owner = model.workers_of or model.name
    spares = [one for one in plan.spares if plan.models[one.model].name == owner]
    every = [*(one for one in plan.workers if plan.models[one.model].name == owner), *spares]
    server = model.settings.server
    return ServedModelConfig(
        name=model.name,
        model_dir=str(model.model_dir),
        digest=server.model_digest,
        aliases=server.model_aliases,
        prefill_addresses=tuple(control[one.name] for one in every if one.role is Role.PREFILL),
        decode_addresses=tuple(control[one.name] for one in every if one.role is Role.DECODE),
        spare_addresses=tuple(control[one.name] for one in spares),
        tool_parser=server.tool_parser,
        reasoning_parser=server.reasoning_parser,
        adapters=server.model_adapters,
        unnamed_adapters=server.unnamed_adapters,
        compute_digest=server.compute_digest,
        default_deadline_s=server.default_deadline_s,
    )


def _num_shares(plan: FleetPlan) -> int:
    """Return the number of workers that share the cores: those that start with the fleet."""
    return len(plan.starting) or len(plan.workers)


def worker_threads(plan: FleetPlan, role: Role, cores: Sequence[int]) -> int:
    """Return the number of threads of a worker: its setting, or its share of the cores."""
    told = plan.settings.worker(role).engine.threads
    return told or max(1, len(cores) // _num_shares(plan))


def _pinned(plan: FleetPlan, cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the reserved cores of each process that has some, by name."""
    if plan.settings.fleet.pin is Pinning.OFF:
        return {}
    decode_names = [worker.name for worker in plan.workers if worker.role is Role.DECODE]
    return own_cores(decode_names, worker_threads(plan, Role.DECODE, cores), cores)


def _loans(plan: FleetPlan, directory: Path, cores: Sequence[int]) -> dict[str, LendingConfig]:
    """Return the lending config of each worker that lends its cores while it is idle.

    Workers with a configured number of threads or with reserved cores do not lend. A spare shares
    the slot of its worker, because only one of them computes. There is at most one slot per core:
    workers of different models may share a slot, and one of them borrows at a time.
    """
    engines = [plan.engine(worker) for worker in plan.workers]
    is_told = any(engine.threads is not None for engine in engines)
    is_told = is_told or plan.settings.fleet.pin is not Pinning.OFF
    is_on_cpu = all(engine.device == "cpu" for engine in engines)
    most = max(sum(count for _, count in model.counts) for model in plan.models)
    if is_told or not is_on_cpu or most > len(cores) or not plan.lends:
        return {}
    num_places = min(_num_shares(plan), len(cores))
    path = str(directory / "cores")
    return {
        name: LendingConfig(path, place, num_places)
        for name, place in plan.places(num_places).items()
    }


def _environment(threads: int, gpu: str | None = None) -> dict[str, str]:
    """Return the environment that limits native libraries to a process's cores and GPU. They read
    it when they are loaded, before our settings."""
    own_gpu = {} if gpu is None else {VISIBLE_GPUS: gpu}
    return own_gpu | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
