"""Settings of `triolet control`, which decides which models have workers, and for how long."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (get_type_hints reads the annotations)
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from ..units import MILLISECONDS, SECONDS
from .limits import (  # noqa: TC001 (get_type_hints reads the annotations)
    Count,
    NotNegative,
    Positive,
    Share,
)
from .link import LinkConfig
from .membership import RedisMembersConfig
from .objectives import ObjectivesConfig

MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class ControlledModelConfig:
    """One model of the fleet. `triolet serve` fills it in."""

    name: str
    """Name for clients."""
    model_dir: str
    """Absolute path of its directory or file."""
    digest: str = ""
    """sha256:… of its version in the store; empty for a model outside the store."""
    num_workers: int = 2
    """Number of its own prefill and decode workers."""
    workers_of: str = ""
    """The version of the same model that has its workers; empty if it has its own."""
    pool_bytes: int = 0
    """Bytes of all KV pools of its workers; 0 if the workers size them."""
    adapter_bytes: int = 0
    """Bytes of LoRA adapters in all its workers: each worker holds all of them."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Digests of the LoRA adapters that requests may name, by name."""
    pinned: bool = False
    """As `models.NAME.pinned`."""
    keep_alive_s: float | None = None
    """As `models.NAME.keep_alive_s`."""


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Decisions about which models stay loaded, and the addresses of control."""

    memory_bytes: Count | None = None
    """For the workers of all models together; auto is `memory_share` of what this machine or its
    control group has free at the start."""
    memory_share: Share = 0.8
    """The rest is for the page cache, which holds the files of sleeping models, and for bursts of
    other programs."""
    gpu_memory_share: Share = 0.95
    """Share of each GPU's memory for the workers of all models; the rest is for steps with growing
    buffers and for other programs."""
    min_residency_s: NotNegative = 60.0 * SECONDS
    """A loaded model stays at least this long: otherwise two models that take turns would do
    nothing but load."""
    admin_port: Annotated[int, Meta(ge=1, le=MAX_PORT)] | None = None
    """Port on 127.0.0.1 for the admin routes; none means only the Unix socket. Every user of this
    machine can reach a port."""
    state_dir: str | None = None
    """Folder for the journal of operations and for measured load times; none is the fleet's own
    folder, which is deleted with the fleet."""
    poll_s: Positive = 0.5 * SECONDS
    """Interval at which the supervisor is asked for its worker processes."""
    measure_s: Positive = 30.0 * SECONDS
    """Interval at which the memory of workers is measured: the kernel walks all their pages for it,
    which takes milliseconds per GiB."""
    operation_timeout_s: Positive = 900.0 * SECONDS
    """Limit for one start or stop of a model's workers: large weights on a slow disk take
    minutes."""
    room_timeout_s: Positive = 300.0 * SECONDS
    """How long a model waits for room among busy ones. After that its operation fails and names the
    models that kept the memory."""
    turn_after_s: NotNegative = 30.0 * SECONDS
    """A load that has waited this long for room goes before later loads, which might otherwise take
    its room again and again; idle models are then unloaded for it one by one."""
    turn_s: NotNegative = 90.0 * SECONDS
    """How long it goes first. By then all models loaded earlier may be evicted, and a model that is
    never idle does not block all other loads."""
    servers_s: Positive = 60.0 * SECONDS
    """Time for servers to read an added model and confirm it; a tokenizer of 250,000 ids takes
    seconds on a busy machine."""
    silence_s: Positive = 5.0 * SECONDS
    """A server that is silent for this long counts as gone: it has missed five reports."""
    tick_s: Positive = 100 * MILLISECONDS
    """Interval for checks that depend on time alone: residency, keep-alive, deadlines."""
    members_poll_s: Positive = 250 * MILLISECONDS
    """As `server.members_poll_s`, which `triolet serve` fills in: a rollout ends only after servers
    have read its permanent route."""
    server_drain_s: NotNegative = 30.0 * SECONDS
    """Time for the remaining requests of a removed model; `triolet serve` sets it to
    `server.drain_timeout_s`."""
    address: str = ""
    """Where servers connect. Set it for a control without `triolet serve`, such as
    `tcp://10.0.0.9:7100`."""
    curve_dir: str | None = None
    """Key directory (`triolet keys make`); required for a tcp address."""
    fleet: str = "triolet"
    """Name of the fleet; servers with another `server.control_fleet` are refused."""
    redis: RedisMembersConfig = field(default_factory=RedisMembersConfig)
    """Where a control without `triolet serve` keeps its rollouts, so that one on another host can
    go on with them. Without it they are in `state_dir`."""
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    """Objectives by which rollouts are judged; `triolet serve` sets it to `server.objectives`."""
    usage_dir: str | None = None
    """Folder of the usage ledger, from which the traffic of a rollout is forecast; `triolet serve`
    sets it to `server.usage.directory`."""
    store: str | None = None
    """Folder of the model store with measured step times, by which the costs of a rollout are
    compared; none is this user's. `triolet serve` sets it to `fleet.store`."""
    link: LinkConfig = field(default_factory=LinkConfig)
    directory: str = ""
    """The fleet's own folder with its sockets. `triolet serve` sets it."""
    models: tuple[ControlledModelConfig, ...] = ()
    """Models of the fleet. `triolet serve` sets it."""
