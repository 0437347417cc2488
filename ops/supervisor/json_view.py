"""Output of `triolet serve` when stdout is not a terminal: JSON logs on stderr, and one JSON line
on stdout once the fleet accepts requests."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import msgspec
import structlog

from triolet.status import ControlReady, Progress, ServerReady, WorkerReady

from ..logs import never_waiting
from ..models.model_directory import shown_path
from .restart_policy import GiveUp, Restart

if TYPE_CHECKING:
    from types import TracebackType

    from triolet.status import Report

    from .plan import FleetPlan
    from .restart_policy import Ending, Verdict

log = structlog.get_logger(__name__)


class JsonView:
    """Shows a fleet as JSON lines, for programs."""

    def __init__(self, plan: FleetPlan) -> None:
        self._plan = plan
        self._pids: dict[str, int] = {}
        self._last_stage: dict[str, str] = {}

    def __enter__(self) -> JsonView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def started(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        log.info("process_started", name=name, pid=pid)

    def reported(self, name: str, report: Report) -> None:
        match report:
            case Progress(stage):
                # Log one line per stage: a large model reports thousands of steps.
                if self._last_stage.get(name) != stage:
                    self._last_stage[name] = stage
                    log.info("process_progress", name=name, stage=stage)
            case WorkerReady():
                log.info("process_ready", **msgspec.structs.asdict(report))
            case ServerReady(url):
                log.info("process_ready", name=name, url=url)
            case ControlReady(admin):
                log.info("process_ready", name=name, admin=admin)

    def ended(self, name: str, ending: Ending, verdict: Verdict | None) -> None:
        match verdict:
            case None:
                log.info("process_ended", name=name, how=str(ending))
            case Restart(delay_s, was_asked_for=True):
                log.info("process_left", name=name, how=str(ending), restart_in_s=delay_s)
            case Restart(delay_s):
                log.warning(
                    "process_died",
                    name=name,
                    how=str(ending),
                    restart_in_s=delay_s,
                    deaths_in_a_row=verdict.num_deaths,
                    within_s=round(verdict.within_s, 3),
                )
            case GiveUp():
                # The reason follows as `model_failed` or as the last line of the fleet.
                log.info("process_given_up", name=name, how=str(ending))

    def failed(self, model: str, reason: GiveUp) -> None:
        log.error("model_failed", model=model, reason=reason.message)
        self._pids = {n: pid for n, pid in self._pids.items() if not n.startswith(f"{model}.")}

    def stopping(self) -> None:
        log.info("stopping", drain_timeout_s=self._plan.settings.server.drain_timeout_s)

    def serving(self, url: str) -> None:
        line = {
            "event": "ready",
            "url": url,
            "api": f"{url}/v1",
            "metrics": f"{url}/metrics",
            **self._models(),
            "pids": {
                "supervisor": os.getpid(),
                **{n: self._pids[n] for n in self._plan.process_names if n in self._pids},
            },
        }
        out = never_waiting(sys.stdout)  # a reader that stops must not block the supervisor
        out.write(json.dumps(line) + "\n")
        out.flush()

    async def run(self) -> None:
        """Return at once: this view holds nothing back."""

    def _models(self) -> dict[str, object]:
        """Return the path of the single unnamed model, or the path of each model by name."""
        paths = {model.name: str(shown_path(model.model_dir)) for model in self._plan.models}
        return {"model": paths[""]} if "" in paths else {"models": paths}
