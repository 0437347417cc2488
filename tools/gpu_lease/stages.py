"""The stages of `gpu_lease`: what each runs, its time limit, and its results.

Standard library only: the stages are listed before any dependency is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PART_S: Final = 540.0
"""Time limit of one invocation including installation: a minute below the ten-minute limit of a
command, for copying the tree and the results."""
INSTALL_S: Final = 40.0
"""Time for installation: unpacking about 70 wheels takes 15 s on a laptop, and the first import of
torch on a new machine takes as long again."""
STOP_S: Final = 15.0
"""Time from SIGTERM to SIGKILL for a stage at its time limit, in which a fleet stops its
processes."""
REHEARSAL_FACTOR: Final = 3.0
"""Factor on time limits for a rehearsal on two shared cores; limits are for 16 cores and a GPU."""
RUNS: Final = "tools.gpu_lease.runs"


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of an invocation, in separate processes.

    Attributes:
      name: name of the stage.
      part: invocation that it belongs to: 1, 2 or 3.
      most_s: time limit in seconds; the stage is skipped if less time is left.
      what: description of what it runs.
      writes: description of its figures.
    """

    name: str
    part: int
    most_s: float
    what: str
    writes: str

    def command(self, python: str, *, rehearse: bool) -> list[str]:
        """Return the command that starts the stage."""
        return [python, "-m", RUNS, self.name, *(["--rehearse"] if rehearse else [])]


STAGES: Final = (
    Stage(
        "compile",
        1,
        120.0,
        "every kernel for sm_90 ahead of time; those of the shapes below by their first call, each "
        "model in a separate process, into one cache",
        "seconds of each process; passed or not",
    ),
    Stage(
        "kernels",
        1,
        260.0,
        "tests/engine/gpu and tests/gpu/test_engine.py, each file in a separate process, four at "
        "once",
        "tests passed, failed and skipped, by file",
    ),
    Stage(
        "staging",
        1,
        40.0,
        "KV out of the pool and in: through a shared-memory ring that is registered, unregistered "
        "and registered again; a block imported and copied on at once while copies are queued",
        "GB/s out and in, whether the ring is pinned, blocks with wrong bytes",
    ),
    Stage(
        "limits",
        1,
        25.0,
        "a copy of 1 GiB, a product of 8192 x 8192 x 8192; products of the 8B's shapes",
        "GB/s, TFLOP/s, numbers of rows with the bits of 256",
    ),
    Stage(
        "compile-speed",
        2,
        90.0,
        "as compile, without the kernels ahead of time",
        "seconds of each process",
    ),
    Stage(
        "small",
        2,
        100.0,
        "0.5B, random weights: decode at 1,024 tokens of context with 1, 32, 128, 256 rows, plain, "
        "each step read, with top_p, with a row replaced every fourth step; a prompt of 8,192",
        "tokens/s and their share of the roofline",
    ),
    Stage("large", 2, 140.0, "8B, random weights: the same", "the same"),
    Stage(
        "trace",
        2,
        50.0,
        "12 decode steps of the 0.5B with 32 rows under torch's profiler",
        "trace.json.gz, the device's busy share, its ten largest kernels",
    ),
    Stage(
        "peer",
        2,
        80.0,
        "transformers' continuous batching: the 0.5B, same rows and context",
        "tokens/s",
    ),
    Stage(
        "compile-fleets",
        3,
        80.0,
        "as compile, without the kernels ahead of time",
        "seconds of each process",
    ),
    Stage(
        "separate",
        3,
        90.0,
        "server, prefill and decode process on the one GPU, 0.5B: 64 streams over HTTP, twice",
        "tokens/s, TTFT, gaps; streams that differ from the first round",
    ),
    Stage(
        "together",
        3,
        80.0,
        "the same without a prefill process: decode computes the prompts",
        "the same; streams that differ from `separate`",
    ),
    Stage(
        "kills",
        3,
        160.0,
        "loadtest.kills with the demo model, --fixed-batch: workers killed under load, every "
        "answer compared with the undisturbed run's",
        "passed or not",
    ),
    Stage(
        "cancels",
        3,
        70.0,
        "loadtest.cancels with the demo model: 100 clients disconnect at random",
        "passed or not",
    ),
)
PARTS: Final = (1, 2, 3)


def refusal(stage: Stage, elapsed_s: float, total_s: float) -> str | None:
    """Return why there is not enough time for a stage, or None."""
    left_s = total_s - elapsed_s
    if left_s >= stage.most_s + STOP_S:
        return None
    return f"{left_s:.0f} s were left, and it may take {stage.most_s + STOP_S:.0f}"
