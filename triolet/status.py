"""What a role process tells whoever started it: progress, ready, failed. One JSON line on stdout.

Knows the lines and how to write and read them. Logs go to stderr and are no part of this; nothing
here says when a role is ready (its main function does) nor what is done about it (ops/ does).
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
"""Says to a server that another one accepts on its socket: leave new connections to that one."""


class Progress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """One step of the way to ready.

    Attributes:
      stage: a word or two for people, such as `weights` or `warm-up`.
      done: units done so far; the same unit as `total`.
      total: units in this stage, at least 1.
    """

    stage: str
    done: int
    total: int


class GpuMemory(msgspec.Struct, frozen=True):
    """What a process holds of a GPU's memory.

    Attributes:
      gpu: its UUID: processes number the GPUs that they see themselves.
      bytes: that the process holds.
      total_bytes: that the GPU has.
    """

    gpu: str
    bytes: int
    total_bytes: int


class WorkerReady(msgspec.Struct, frozen=True, tag_field="event", tag="worker_ready"):
    """A prefill or decode worker has loaded its model, warmed up, and listens.

    Attributes:
      name: its name in the fleet.
      parameters: weights in the model, tied ones counted once.
      dtype: what it computes in.
      device: `cpu`, `cuda:0`, ...
      num_blocks: KV blocks that can be leased (block 0 is scratch and not counted).
      block_size: tokens per block.
      pool_bytes: memory of the whole KV pool.
      max_model_len: context length in tokens.
      gpu_memory: None where it computes on a CPU.
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
    """The server listens; whether workers are connected is what its /health/ready says.

    Attributes:
      url: base address with the port that was really bound.
    """

    url: str


class ControlReady(msgspec.Struct, frozen=True, tag_field="event", tag="control_ready"):
    """Control listens for servers and for commands.

    Attributes:
      admin: path of the Unix socket with the admin routes.
    """

    admin: str


class ProcessFailed(msgspec.Struct, frozen=True, tag_field="event", tag="failed"):
    """A role ends because of its configuration or model; starting it again would not help.

    Attributes:
      message: cause and remedy in one line.
    """

    message: str


Report: TypeAlias = Progress | WorkerReady | ServerReady | ControlReady | ProcessFailed

_DECODER: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def report(what: Report, stream: BinaryIO | None = None) -> None:
    """Write one line at once.

    Args:
      what: the news.
      stream: where to; None is stdout.
    """
    out = sys.stdout.buffer if stream is None else stream
    # A reader that went away is noticed by the process that watches its parent, not here; and a
    # full disk is nobody's news.
    with contextlib.suppress(OSError):
        out.write(msgspec.json.encode(what) + b"\n")
        out.flush()


def parse_report(line: bytes) -> Report | None:
    """Return the report in one line of a role's stdout, or None if the line is something else."""
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return None
