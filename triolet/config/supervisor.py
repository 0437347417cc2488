"""Settings of `triolet serve`: the processes of a fleet on one machine, and how they are kept
alive."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (get_type_hints reads the annotations)
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ..units import KIB, MILLISECONDS, SECONDS
from .adapters import require_adapter_names
from .limits import Count, Positive, require

MAX_SERVERS: Final = 16
"""Servers on one port: each takes a core per tens of thousands of tokens a second."""
MAX_WORKERS: Final = 64
"""Workers of one role on one machine: far more than its cores can use, and far fewer than ports and
files allow."""


class Pinning(StrEnum):
    """Whether decode workers get their own cores."""

    OFF = "off"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The processes that `triolet serve` starts on one machine."""

    model: str | None = None
    """Hugging Face directory, GGUF file, `demo`, `smollm2`, or `auto` (smollm2 if available); or a
    version of the store, such as `chat@stable`. None means the demo model. Also used by a role that
    runs alone."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name, each a PEFT directory or a version of the store; requests name
    `MODEL:ADAPTER`. For named models: `models.NAME.adapters`. A role that runs alone must get the
    same adapters."""
    store: str | None = None
    """Folder of the model store; none means the user's `$XDG_DATA_HOME/triolet/models`."""
    servers: int = 1
    """Server processes that share the port; each can fill a core."""
    prefill: int = 1
    """Prefill workers; with 0, decode workers compute prompts themselves."""
    decode: int = 1
    """Decode workers."""
    pin: Pinning = Pinning.OFF
    """`auto` gives each decode worker as many cores of its own as it has threads, if at least one
    is left for the others. Linux only."""

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
    """Size of the model store, for `triolet model pull` and `gc`. `fleet.store` says where it
    is."""

    limit_bytes: Count | None = None
    """Beyond this size, such as 50GiB, versions that a registry has are evicted, longest unused
    first; none means no limit."""


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Settings of every process, whatever its role."""

    log_level: str | None = None
    """`debug`, `info`, `warning` or `error`; None means info, and warning on a terminal."""
    supervisor_pid: int | None = None
    """When this process ends, so does ours; our standard input is then a pipe from it."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """How `triolet serve` keeps its processes alive on one machine."""

    restart_delay_s: float = 100 * MILLISECONDS
    """Delay before the second restart in a row, and after a process that exited by itself. The
    first crash is followed by a new process at once: clients wait for it."""
    max_restart_delay_s: float = 10.0 * SECONDS
    """The delay doubles with each further crash in a row up to this, so that a worker that keeps
    crashing does not use up the machine."""
    stable_s: float = 30.0 * SECONDS
    """After a process was ready for this long, its earlier crashes no longer count."""
    max_failed_starts: int = 3
    """Crashes in a row before ready, after which no further start is tried."""
    control_retry_s: Positive = 30.0 * SECONDS
    """Control is started again this long after it was given up, without limit: without it models
    stay as they are, and none is woken."""
    templates: bool = True
    """Whether processes are forked from templates that have already imported their modules: a dead
    worker serves again two seconds sooner, for the memory of these imports, which is mostly
    shared. Linux only; workers on GPUs are always spawned."""
    start_silence_s: float = 120.0 * SECONDS
    """A starting process that reports nothing for this long is stuck. Reading one shard of a large
    model from a slow disk takes less."""
    ready_timeout_s: float = 60.0 * SECONDS
    """From the last process's ready to the first 200 of /health/ready: they only have to
    connect."""
    ready_poll_s: float = 50 * MILLISECONDS
    """Interval of requests to /health/ready at the start."""
    worker_exit_s: float = 5.0 * SECONDS
    """A worker that has not exited this long after SIGTERM is killed: its streams are over."""
    adapter_start_s: Positive = 60.0 * SECONDS
    """For each worker that is restarted to load or unload an adapter: if one takes longer or exits,
    all are restarted as they were before. With a template it takes less than a second plus the time
    to read the adapters."""
    output_drain_s: float = 1.0 * SECONDS
    """How long to read a dead process's output; more can only come from a process that it left
    behind."""
    episode_hold_s: Positive = 5.0 * SECONDS
    """On a terminal, unless debug lines are shown: how long warnings about a lost worker wait for
    its return, to become one line. On a busy machine it is back within three seconds."""
    max_line_bytes: int = 64 * KIB
    """Longest line of a child's output; the rest of a longer one is dropped."""


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How the file of a known model is downloaded."""

    deadline_s: float = 900.0 * SECONDS
    """For the whole download: 100 MB at 1 Mbit/s take a little less."""
    silence_s: float = 15.0 * SECONDS
    """pip gives up a connection without data for this long, and retries once."""
    poll_s: float = 200 * MILLISECONDS
    """Interval at which progress is checked, and whether another process has the file."""
