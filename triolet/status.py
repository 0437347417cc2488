"""Reports of a role process to its parent: progress, ready, failed. One JSON line each on stdout.

Logs go to stderr. The role's main function decides when it is ready; ops/ acts on the reports.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from typing import BinaryIO

SUCCESSOR_SIGNAL: Final = signal.SIGUSR1
"""Tells a server that a successor accepts on its socket: leave new connections to it."""


class Progress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """One step of a start.

    Attributes:
      stage: a word or two for people, such as `weights` or `warm-up`.
      done: units done so far; the same unit as `total`.
      total: units in this stage, at least 1.
    """

    stage: str
    done: int
    total: int


class GpuMemory(msgspec.Struct, frozen=True):
    """GPU memory held by a process.

    Attributes:
      gpu: its UUID, because processes number the GPUs that they see differently.
      bytes: held by the process.
      total_bytes: total memory of the GPU.
    """

    gpu: str
    bytes: int
    total_bytes: int


class WorkerReady(msgspec.Struct, frozen=True, tag_field="event", tag="worker_ready"):
    """A prefill or decode worker has loaded its model, warmed up, and listens.

    Attributes:
      name: name in the fleet.
      parameters: weights in the model, tied ones counted once.
      dtype: data type of its computation.
      device: `cpu`, `cuda:0`, ...
      num_blocks: KV blocks that can be leased (block 0 is scratch and not counted).
      block_size: tokens per block.
      pool_bytes: memory of the whole KV pool.
      max_model_len: context length in tokens.
      gpu_memory: None on a CPU.
    """

    name: str
    parameters: int
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    pool_bytes: int
    max_model_len: int
    gpu_memory: GpuMemory | None = None


class ServerReady(msgspec.Struct, frozen=True, tag_field="event", tag="server_ready"):
    """The server listens. Its /health/ready says whether workers are connected.

    Attributes:
      url: base address with the actual port.
    """

    url: str


class ControlReady(msgspec.Struct, frozen=True, tag_field="event", tag="control_ready"):
    """Control listens for servers and for commands.

    Attributes:
      admin: path of the Unix socket with the admin routes.
    """

    admin: str


class ProcessFailed(msgspec.Struct, frozen=True, tag_field="event", tag="failed"):
    """A role ends because of its configuration or model; restarting it would not help.

    Attributes:
      message: cause and remedy in one line.
    """

    message: str


Report: TypeAlias = Progress | WorkerReady | ServerReady | ControlReady | ProcessFailed

_DECODER: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def report(what: Report, stream: BinaryIO | None = None) -> None:
    """Write one report immediately.

    Args:
      what: the report.
      stream: stream to write to; None is stdout.
    """
    out = sys.stdout.buffer if stream is None else stream
    # The watcher of the parent process notices a reader that has gone, and a full disk is not worth
    # reporting here.
    with contextlib.suppress(OSError):
        out.write(msgspec.json.encode(what) + b"\n")
        out.flush()


def parse_report(line: bytes) -> Report | None:
    """Parse a line of a role's stdout; return None if it is not a report."""
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return None
