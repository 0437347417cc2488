"""`triolet model ps`: shows the models and workers of a fleet on this machine.

Combines what the supervisor reports (processes) with what the server reports (public names).
"""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import httpx2
import msgspec
import trio
import typer

from transport.control_protocol import ModelState
from triolet.errors import said_by
from triolet.units import KIB, show_size

from ..api_key import key_headers
from ..chosen_fleet import fleet_to_show
from ..http_trust import verify_for
from ..supervisor.supervisor_socket import ask_models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.config.routes import Route

    from ..supervisor.model_status import ModelStatus, RunningWorker

SERVER_TIMEOUT_S: Final = 2.0
"""Timeout of the list of models, which a server answers from memory."""
NEEDS_KEY: Final = "it reports versions only to requests with a key; set TRIOLET_API_KEY"
_PROC: Final = Path("/proc")
_PSS: Final = re.compile(r"^Pss:\s*(\d+) kB", re.MULTILINE)


class Served(msgspec.Struct, frozen=True):
    """A model as a server reports it.

    Attributes:
      id: public name.
      digest: digest of its version in the store; None for a directory.
      state: state of the model, such as serving.
    """

    id: str
    digest: str | None = None
    state: str | None = None


class _List(msgspec.Struct, frozen=True):
    data: list[Served]


class _Named(msgspec.Struct, frozen=True):
    name: str
    state: str


class _Ready(msgspec.Struct, frozen=True):
    """A readiness response, which needs no key. `models` is empty for a single model."""

    model: str
    models: list[_Named] = []

    @property
    def served(self) -> list[Served]:
        named = self.models or [_Named(self.model, ModelState.SERVING.value)]
        return [Served(one.name, None, one.state) for one in named]


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker of a model.

    Attributes:
      name: name in logs and metrics.
      role: prefill or decode.
      pid: process id; None if no process runs.
      is_ready: whether it serves.
      memory_bytes: memory of the process with its share of shared pages (PSS); None if the system
        does not report it.
    """

    name: str
    role: str
    pid: int | None
    is_ready: bool
    memory_bytes: int | None


class ModelRow(msgspec.Struct, frozen=True):
    """One model of a fleet.

    Attributes:
      name: public name.
      digest: digest of its version in the store; None for a directory, or if no server answers.
      state: state reported by the server; None if no server answers.
      workers_state: state reported by the supervisor.
      failure: why the workers failed.
      workers: workers of the model.
    """

    name: str
    digest: str | None
    state: str | None
    workers_state: str
    failure: str | None
    workers: list[WorkerRow]


def run_ps(port: int | None, *, as_json: bool) -> None:
    """Print the models of a fleet with their workers.

    Args:
      port: port of the local fleet, if several run.
      as_json: print JSON.

    Raises:
      CommandFailed: no fleet runs.
    """
    fleet = fleet_to_show(port)
    told = trio.run(ask_models, fleet.supervisor_socket)
    served, objection = served_models(fleet.note.url)
    if objection:
        typer.echo(f"{fleet.note.url} did not report all its models: {objection}", err=True)
    found = rows(told.models, served, fleet.note.models, told.routes)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    for row in found:
        name = row.name if row.digest is None else f"{row.name}@{row.digest}"
        typer.echo(f"{name}  {row.state or '-'}  workers {row.workers_state}")
        if row.failure is not None:
            typer.echo(f"  {row.failure}")
        for one in row.workers:
            pid = "-" if one.pid is None else str(one.pid)
            memory = "-" if one.memory_bytes is None else show_size(one.memory_bytes)
            is_ready = "ready" if one.is_ready else "not ready"
            typer.echo(f"  {one.name:<24}  pid {pid:>7}  {is_ready:<9}  {memory:>9}")


def served_models(url: str) -> tuple[list[Served], str]:
    """Return the models that a server reports, and an empty string or why some are missing.

    Args:
      url: base address of the server.
    """
    try:
        with httpx2.Client(
            base_url=url,
            timeout=SERVER_TIMEOUT_S,
            trust_env=False,
            verify=verify_for(url),
            headers=key_headers(),
        ) as client:
            answer = client.get("/v1/models")
            if answer.status_code == httpx2.codes.UNAUTHORIZED:
                ready = client.get("/health/ready")  # needs no key
                known = (
                    msgspec.json.decode(ready.content, type=_Ready) if ready.is_success else None
                )
                return [] if known is None else known.served, NEEDS_KEY
            return msgspec.json.decode(answer.raise_for_status().content, type=_List).data, ""
    except (httpx2.HTTPError, msgspec.MsgspecError) as error:
        return [], said_by(error)


def rows(
    running: list[ModelStatus],
    served: list[Served],
    names: Sequence[str] = (),
    routes: Mapping[str, Route] = MappingProxyType({}),
    proc: Path = _PROC,
) -> list[ModelRow]:
    """Merge the reports of the supervisor and of a server into one row per model.

    Args:
      running: models reported by the supervisor.
      served: models reported by a server; empty if none answers.
      names: model names noted by the supervisor, for when no server answers.
      routes: routes by public name. Servers report the stable version of each.
      proc: directory of processes in Linux.
    """
    by_name: Mapping[str, Served] = {one.id: one for one in served}
    public = {route.stable: name for name, route in routes.items()}
    found = []
    for model in running:
        # A single model has an empty name here; only clients see a name.
        name = public.get(model.name, model.name)
        known = by_name.get(name) if name else next(iter(served), None)
        found.append(
            ModelRow(
                known.id if known is not None else model.name or next(iter(names), "-"),
                None if known is None else known.digest,
                None if known is None else known.state,
                model.state.value,
                model.failure,
                [_row(worker, proc) for worker in model.workers],
            )
        )
    return found


def _row(worker: RunningWorker, proc: Path) -> WorkerRow:
    memory = None if worker.pid is None else memory_bytes(worker.pid, proc)
    return WorkerRow(worker.name, worker.role.value, worker.pid, worker.is_ready, memory)


def memory_bytes(pid: int, proc: Path = _PROC) -> int | None:
    """Return the memory of a process with its share of shared pages (PSS), or None if the system
    does not report it.

    Args:
      pid: process id.
      proc: directory of processes in Linux.
    """
    try:
        found = _PSS.search((proc / str(pid) / "smaps_rollup").read_text(encoding="ascii"))
    except OSError:
        return None
    return None if found is None else int(found[1]) * KIB
