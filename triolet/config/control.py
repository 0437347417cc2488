"""Settings of `triolet control`: which models of a fleet may be resident, and for how long."""

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

MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class ControlledModelConfig:
    """One model as control knows it; `triolet serve` fills it in."""

    name: str
    """What clients call it."""
    model_dir: str
    """Absolute path of its directory or file."""
    digest: str = ""
    """sha256:… of its version in the store; empty where it is not in one."""
    num_workers: int = 2
    """Prefill and decode workers together."""
    pool_bytes: int = 0
    """KV pools of its workers together; 0 where they are sized by the workers."""
    adapter_bytes: int = 0
    """LoRA adapters of its workers together: each worker holds all of them."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Digests of the LoRA adapters that requests may name, by name."""
    pinned: bool = False
    """As `models.NAME.pinned`."""
    keep_alive_s: float | None = None
    """As `models.NAME.keep_alive_s`."""


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """What decides about residency, and where it is reached."""

    memory_bytes: Count | None = None
    """For the workers of all models together; auto is `memory_share` of what this machine or its
    control group has left beside them at the start."""
    memory_share: Share = 0.8
    """The rest is for the page cache, which holds the files of sleeping models, and for bursts of
    other programs."""
    gpu_memory_share: Share = 0.95
    """Of each GPU's memory, for the workers of all models together; the rest is for steps whose
    buffers grow, and for other programs."""
    min_residency_s: NotNegative = 60.0 * SECONDS
    """A model that was loaded stays for so long, whatever others want: two models that take turns
    would otherwise only load."""
    admin_port: Annotated[int, Meta(ge=1, le=MAX_PORT)] | None = None
    """Port on 127.0.0.1 for the admin routes; none is the Unix socket alone. Every user of this
    machine reaches a port."""
    state_dir: str | None = None
    """Folder of the journal of operations and of measured load times; none is the fleet's own
    folder, which ends with the fleet."""
    poll_s: Positive = 0.5 * SECONDS
    """How often the supervisor is asked for its worker processes."""
    measure_s: Positive = 30.0 * SECONDS
    """How often the memory of workers is measured: the kernel walks all their pages for it, which
    takes milliseconds for each GiB."""
    operation_timeout_s: Positive = 900.0 * SECONDS
    """For one start or stop of a model's workers: large weights from a slow disk take minutes."""
    room_timeout_s: Positive = 300.0 * SECONDS
    """A model that finds no room among busy ones for so long is given up, and its operation fails
    with what kept the memory."""
    turn_after_s: NotNegative = 30.0 * SECONDS
    """A load that waited for room so long comes before younger ones, which would take what it needs
    again and again; idle models then end for it one by one."""
    turn_s: NotNegative = 90.0 * SECONDS
    """For which it comes first: models that were loaded before are old enough then to be evicted,
    and a model that is never idle does not keep all others from loading."""
    servers_s: Positive = 60.0 * SECONDS
    """For servers to read a model that is added, and to say so; a tokenizer of 250,000 ids takes
    seconds on a busy machine."""
    silence_s: Positive = 5.0 * SECONDS
    """A server that says nothing for so long is taken for gone: five reports were lost."""
    tick_s: Positive = 100 * MILLISECONDS
    """How often is looked for what time alone changes: residency, keep-alive, deadlines."""
    server_drain_s: NotNegative = 30.0 * SECONDS
    """For requests of a model that is dropped; `triolet serve` sets it to
    `server.drain_timeout_s`."""
    directory: str = ""
    """The fleet's own folder, with its sockets; `triolet serve` sets it."""
    models: tuple[ControlledModelConfig, ...] = ()
    """`triolet serve` sets it."""
