"""Which processes a local fleet has, where each listens, and how many CPU threads each gets.

Pure: settings and the machine's size in, processes out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from triolet.config import (
    MAX_WORKERS,
    ControlledModelConfig,
    LendingConfig,
    LocalPrefill,
    PeerServersConfig,
    Pinning,
    ServedModelConfig,
)
from triolet.control_protocol import CONTROL_SOCKET
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
"""Of the only one; several are numbered."""
CONTROL_NAME = "control"


class PlannedWorker(NamedTuple):
    """One worker of a fleet, or what stands in for it.

    Attributes:
      model: that it computes, by its place among the models of the fleet.
      role: prefill or decode.
      name: in logs, metrics and commands.
      file: begins the names of its sockets, whose paths are short.
    """

    model: int
    role: Role
    name: str
    file: str


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model of a fleet.

    Attributes:
      model_dir: absolute path.
      settings: of its workers, and of a server as if this were its only model.
      dtypes: what each kind of worker computes in.
      number: in the names of its sockets; None for its place among the models of the fleet.
      adapter_bytes: what the adapters take in the memory of one worker of each kind.
    """

    model_dir: Path
    settings: Settings
    dtypes: Mapping[Role, Dtype] = field(default_factory=dict)
    adapter_bytes: Mapping[Role, int] = field(default_factory=dict)
    number: int | None = None

    @property
    def name(self) -> str:
        """What requests call it, and how the names of its workers begin; empty for the only model
        of a fleet that was given none."""
        return next(iter(self.settings.models), "")

    @property
    def starts(self) -> bool:
        """Whether its workers start with the fleet."""
        return all(model.start for model in self.settings.models.values())

    @property
    def counts(self) -> tuple[tuple[Role, int], ...]:
        """How many workers of each role it has."""
        fleet = self.settings.fleet
        return ((Role.PREFILL, fleet.prefill), (Role.DECODE, fleet.decode))


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet on one machine.

    Attributes:
      settings: of every process; addresses and names are filled in here. Workers without `threads`
        get a fair share of the cores.
      models: at least one; one without a name is the only one.
      gpus: of this machine, as CUDA_VISIBLE_DEVICES names them.
      lends: whether workers may lend one another their cores.
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
                    f"{field} is 0, and server.routing.local_prefill is off: nothing computes "
                    "prompts; allowed: 1 to 64 prefill workers, or auto or always"
                )
        for role in (Role.PREFILL, Role.DECODE):
            count = sum(worker.role is role for worker in self.workers)
            if count > MAX_WORKERS:
                raise ConfigError(
                    f"{len(self.models)} models have {count} {role} workers together; allowed: at "
                    f"most {MAX_WORKERS}; give models.NAME.{role} for fewer"
                )

    @property
    def server_names(self) -> list[str]:
        """Of each server."""
        servers = self.settings.fleet.servers
        if servers == 1:
            return [SERVER_NAME]
        return [f"{SERVER_NAME}-{number}" for number in range(servers)]

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests call each model."""
        return tuple(model.name or model.settings.server.model_name for model in self.models)

    @property
    def workers(self) -> list[PlannedWorker]:
        """Each worker of each model."""
        return [
            self._worker(place, role, str(number))
            for place, model in enumerate(self.models)
            for role, count in model.counts
            for number in range(count)
        ]

    @property
    def spares(self) -> list[PlannedWorker]:
        """What stands in for the only worker of its model and role while that is restarted: nothing
        runs there otherwise."""
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
        """The workers that run from the start on."""
        return [worker for worker in self.workers if self.models[worker.model].starts]

    @property
    def has_control(self) -> bool:
        """Whether models come and go while the fleet runs: where they have names."""
        return bool(self.models[0].name)

    @property
    def worker_drain_s(self) -> float:
        """The longest time that a worker may take to finish what it runs [s]."""
        roles = {worker.role for worker in self.workers}
        return max(self.settings.worker(role).drain_timeout_s for role in roles)

    @property
    def process_names(self) -> list[str]:
        """Every process that runs from the start on, the servers first."""
        control = [CONTROL_NAME] * self.has_control
        return [*self.server_names, *control, *(worker.name for worker in self.starting)]

    def with_count(self, place: int, role: Role, count: int) -> FleetPlan:
        """Return the plan with another number of workers of a model and role.

        Args:
          place: of the model.
          role: of the workers.
          count: how many there are.

        Raises:
          ConfigError: there cannot be so many.
        """
        settings = self.models[place].settings
        is_prefill = role is Role.PREFILL
        fleet = (
            replace(settings.fleet, prefill=count)
            if is_prefill
            else replace(settings.fleet, decode=count)
        )
        model = replace(self.models[place], settings=replace(settings, fleet=fleet))
        # Those that run share the cores among as many as there were: the new ones have no place.
        models = (*self.models[:place], model, *self.models[place + 1 :])
        return replace(self, models=models, lends=False)

    def with_models(self, models: Sequence[ModelPlan]) -> FleetPlan:
        """Return the plan with other models, one at least; those that run share the cores among as
        many as there were.

        Raises:
          ConfigError: there cannot be so many workers.
        """
        named = {model.name: model.settings.models[model.name] for model in models}
        settings = replace(self.settings, models=named)
        return replace(self, settings=settings, models=tuple(models), lends=False)

    def engine(self, worker: PlannedWorker) -> EngineConfig:
        """Return what a worker computes with."""
        return self.models[worker.model].settings.worker(worker.role).engine

    def places(self, num_places: int) -> dict[str, int]:
        """Return a place of each worker and stand-in, by name: those that run from the start on
        come first, then the others, each in turn. A stand-in has the place of its worker.

        Args:
          num_places: how many there are; more workers share them.
        """
        ordered = sorted(self.workers, key=lambda one: not self.models[one.model].starts)
        own = {one.name: place % num_places for place, one in enumerate(ordered)}
        return own | {spare.name: own[self._origin(spare).name] for spare in self.spares}

    def _origin(self, spare: PlannedWorker) -> PlannedWorker:
        """Return the worker that a stand-in stands in for."""
        return next(
            one for one in self.workers if (one.model, one.role) == (spare.model, spare.role)
        )

    @property
    def own_gpus(self) -> dict[str, str]:
        """The one GPU of each worker, where GPUs are dealt out. A stand-in has that of the worker
        that it stands in for.

        Raises:
          ConfigError: the device is a GPU that is not there.
        """
        own: dict[str, str] = {}
        devices = {worker.name: self.engine(worker).device for worker in self.workers}
        for device in dict.fromkeys(devices.values()):
            names = [name for name, one in devices.items() if one == device]
            own |= own_gpus(device, names, self.gpus)
        origins = {spare.name: self._origin(spare).name for spare in self.spares}
        return own | {name: own[origin] for name, origin in origins.items() if origin in own}


def control_address(directory: Path, worker: PlannedWorker) -> str:
    """Return where a worker of a local fleet is reached."""
    return f"ipc://{directory}/{worker.file}.control"


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
    """Return the settings with what servers are told of the models and their workers.

    Args:
      plan: the fleet.
      control: addresses of workers and stand-ins, by name.
      directory: of the fleet, with its sockets.
    """
    models = tuple(served_model(plan, place, control) for place in range(len(plan.models)))
    if plan.has_control:
        path = str(directory / CONTROL_SOCKET)
        return of_role(plan.settings, Role.SERVER, models=models, control_socket=path)
    (only,) = models
    return of_role(
        _with_model(plan.settings, plan.models[0]),
        Role.SERVER,
        prefill_addresses=only.prefill_addresses,
        decode_addresses=only.decode_addresses,
        spare_addresses=only.spare_addresses,
    )


def _of_control(plan: FleetPlan, directory: Path) -> Settings:
    """Return the settings with what control is told of the models."""
    models = tuple(controlled(model) for model in plan.models)
    control = replace(
        plan.settings.control,
        directory=str(directory),
        models=models,
        server_drain_s=plan.settings.server.drain_timeout_s,
    )
    return replace(plan.settings, control=control)


def controlled(model: ModelPlan) -> ControlledModelConfig:
    """Return what control is told of a model."""
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
        pinned=own.pinned,
        keep_alive_s=own.keep_alive_s,
    )


def served_model(plan: FleetPlan, place: int, control: Mapping[str, str]) -> ServedModelConfig:
    """Return what servers are told of a model.

    Args:
      plan: the fleet.
      place: of the model in it.
      control: addresses of workers and stand-ins, by name.
    """
    model = plan.models[place]
    spares = [one for one in plan.spares if one.model == place]
    every = [*(one for one in plan.workers if one.model == place), *spares]
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
    )


def _num_shares(plan: FleetPlan) -> int:
    """Return among how many workers the cores are divided: those that run from the start on."""
    return len(plan.starting) or len(plan.workers)


def worker_threads(plan: FleetPlan, role: Role, cores: Sequence[int]) -> int:
    """Return the threads of a worker: as many as it was told, or its share of the cores."""
    told = plan.settings.worker(role).engine.threads
    return told or max(1, len(cores) // _num_shares(plan))


def _pinned(plan: FleetPlan, cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each process that gets some of its own, by its name."""
    if plan.settings.fleet.pin is Pinning.OFF:
        return {}
    decode_names = [worker.name for worker in plan.workers if worker.role is Role.DECODE]
    return own_cores(decode_names, worker_threads(plan, Role.DECODE, cores), cores)


def _loans(plan: FleetPlan, directory: Path, cores: Sequence[int]) -> dict[str, LendingConfig]:
    """Return what each worker is told that lends its cores while it has nothing to compute.

    A worker with a number of threads or with cores of its own uses these and no others. A stand-in
    has the place of the worker that it stands in for: of both one computes. Several models have a
    place for each core at most: workers of different models share one where there are more, and of
    these one at a time borrows.
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
    """Return what keeps the native libraries of a process to its share of the cores and to its
    GPU; they read it when they are loaded, which is before any option of ours is."""
    own_gpu = {} if gpu is None else {VISIBLE_GPUS: gpu}
    return own_gpu | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
