"""Settings of a fleet on one machine and of each process: which run, how they are kept alive."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (get_type_hints reads the annotations)
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ..units import KIB, MILLISECONDS, SECONDS
from .adapters import require_adapter_names
from .limits import Count, Positive, require

MAX_SERVERS: Final = 16
"""Servers of one port: a server takes a core for tens of thousands of tokens a second."""
MAX_WORKERS: Final = 64
"""Workers of one role on one machine: far above what its cores can use, far below what ports and
files allow."""


class Pinning(StrEnum):
    """Whether decode workers get cores of their own."""

    OFF = "off"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What `triolet serve` starts on one machine."""

    model: str | None = None
    """Hugging Face directory, GGUF file, `demo`, `smollm2`, or `auto`: smollm2 if it can be had;
    or a version of the store, such as `chat@stable`. None is the demo model. A role that runs alone
    serves it too."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name, each a directory as PEFT saves it or a version of the store; requests
    name `MODEL:ADAPTER`. Of models with names: `models.NAME.adapters`. A role that runs alone must
    be given the same."""
    store: str | None = None
    """Folder of the model store; none is `$XDG_DATA_HOME/triolet/models`, where models are the
    user's own."""
    servers: int = 1
    """Server processes that share the port; each can fill a core."""
    prefill: int = 1
    """Prefill workers; with 0 decode workers compute prompts themselves."""
    decode: int = 1
    """Decode workers."""
    pin: Pinning = Pinning.OFF
    """`auto` gives each decode worker as many cores of its own as it has threads, where at least
    one is left for the others. On Linux."""

    def __post_init__(self) -> None:
        require_adapter_names(self.adapters)
        for name, least, most in (
            ("servers", 1, MAX_SERVERS),
            ("prefill", 0, MAX_WORKERS),
            ("decode", 1, MAX_WORKERS),
        ):
            count = getattr(self, name)
            require(least <= count <= most, name, count, f"{least} to {most}")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What the model store may take. `triolet model pull` and `gc` read it; where the store is says
    `fleet.store`."""

    limit_bytes: Count | None = None
    """Versions that a registry has are evicted beyond it, the longest unused first, such as 50GiB;
    none is no limit."""


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """What every process has, whatever its role."""

    log_level: str | None = None
    """`debug`, `info`, `warning` or `error`; None is info, and warning on a terminal."""
    supervisor_pid: int | None = None
    """Process whose end ends this one; its standard input is then a pipe from it."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """How `triolet serve` keeps its processes alive on one machine."""

    restart_delay_s: float = 100 * MILLISECONDS
    """Before the second restart in a row, and before that of a process that left by itself. The
    first death is followed by a new process at once: clients wait for it."""
    max_restart_delay_s: float = 10.0 * SECONDS
    """The delay doubles with each further death in a row up to this, so that a worker that keeps
    dying does not eat the machine."""
    stable_s: float = 30.0 * SECONDS
    """A process that was ready for this long starts with a clean record."""
    max_failed_starts: int = 3
    """Deaths in a row before ready, after which trying again is no answer."""
    control_retry_s: Positive = 30.0 * SECONDS
    """Control that was given up so is tried again after this time, for ever: without it models stay
    as they are, and none is woken."""
    templates: bool = True
    """Whether processes are forked from ones that have imported what they need: a dead worker then
    serves again without the two seconds of its imports, for the memory of these imports, most of
    which is shared. On Linux; workers on GPUs are always spawned."""
    start_silence_s: float = 120.0 * SECONDS
    """A process that starts and reports nothing for this long is wedged. Reading one shard of a
    large model from a slow disk takes less."""
    ready_timeout_s: float = 60.0 * SECONDS
    """From the last process's ready to the first 200 of /health/ready: they only have to meet."""
    ready_poll_s: float = 50 * MILLISECONDS
    """How often /health/ready is asked at the start."""
    worker_exit_s: float = 5.0 * SECONDS
    """A worker that has not left this long after SIGTERM is killed: its streams are over."""
    adapter_start_s: Positive = 60.0 * SECONDS
    """For each worker that is started anew to load or unload an adapter: one that takes longer, or
    ends, is started as it was before, and so are the others. With a template it takes less than a
    second and the time to read the adapters."""
    output_drain_s: float = 1.0 * SECONDS
    """What a dead process wrote is read for this long; more can only come from a process that it
    left behind."""
    episode_hold_s: Positive = 5.0 * SECONDS
    """On a terminal, unless debug lines are shown: how long the warnings of a worker that is lost
    wait for its return, to become one line. On a busy machine it is back within three seconds."""
    max_line_bytes: int = 64 * KIB
    """Longest line of a child's output that is read; the rest of a longer one is dropped."""


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How a known model's file is fetched."""

    deadline_s: float = 900.0 * SECONDS
    """For the whole download: 100 MB at 1 Mbit/s take a little less."""
    silence_s: float = 15.0 * SECONDS
    """pip gives a connection up that brings nothing for so long, and tries once more."""
    poll_s: float = 200 * MILLISECONDS
    """How often the progress is looked at, and whether another process has it."""
