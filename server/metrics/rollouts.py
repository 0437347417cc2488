"""Metrics of rollouts, from what control last said of them. A gate such as an AnalysisTemplate of
Argo Rollouts reads them from Prometheus."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from transport.rollout_protocol import RolloutPhase

from .collectors import GAUGE, family

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from transport.rollout_protocol import RolloutView

    from .collectors import Labels

    Samples: TypeAlias = Iterable[tuple[Labels, float]]
    Rows: TypeAlias = tuple[tuple[str, str, Labels, Callable[[RolloutView], Samples]], ...]

OF_ROLLOUT: Final = ("model", "version")
"""Public name of the model, and name of the candidate."""
ARMS: Final = ("stable", "candidate")
RESULTS: Final = tuple((arm, result) for arm in ARMS for result in ("good", "bad"))
"""Meaning of the four counts of a signal."""


def _sum(name: str) -> Callable[[RolloutView], Samples]:
    """Return a reader of one sum over shadow copies."""
    return lambda view: [((), getattr(view.shadow, name))]


def _of_arms(name: str) -> Callable[[RolloutView], Samples]:
    """Return a reader of a pair of sums over requests and their shadow copies."""
    return lambda view: zip(zip(ARMS, strict=True), getattr(view.shadow, name), strict=True)


ROWS: Final[Rows] = (
    ("rollout_share", "The candidate's share of new requests", (), lambda view: [((), view.share)]),
    ("rollout_step", "Step of a rollout; 0 before the first", (), lambda view: [((), view.step)]),
    (
        "rollout_phase",
        "1 for the phase that a rollout is in",
        ("phase",),
        lambda view: [((phase.value,), phase is view.phase) for phase in RolloutPhase],
    ),
    (
        "rollout_requests",
        "Requests of the current step by signal, version and result",
        ("signal", "arm", "result"),
        lambda view: [
            ((signal, *which), count)
            for signal, counts in view.counts.items()
            for which, count in zip(RESULTS, counts, strict=True)
        ],
    ),
    (
        "rollout_cost_ratio",
        "Bounds of the candidate's cost, divided by the stable version's",
        ("bound",),
        lambda view: zip((("low",), ("high",)), view.cost or (), strict=False),
    ),
    (
        "shadow_share",
        "Share of requests that are copied to the candidate",
        (),
        lambda view: [((), view.shadow_share)],
    ),
    *(
        (f"shadow_{name}", text, (), _sum(name))
        for name, text in (
            ("pairs", "Requests compared with their shadow copies"),
            ("failed", "Shadow copies that failed"),
            ("skipped", "Shadow copies not begun or not finished, to leave room for requests"),
            ("rows_while_waiting", "Times that a copy got tokens while a request waited"),
            ("same_finish", "Pairs with the same finish reason"),
            ("equal_tokens", "Tokens of pairs before their first difference"),
        )
    ),
    ("shadow_tokens", "Tokens of pairs", ("arm",), _of_arms("tokens")),
    ("shadow_ttft_seconds", "Times to first token of pairs", ("arm",), _of_arms("ttft_s")),
    ("shadow_itl_seconds", "Mean times between tokens of pairs", ("arm",), _of_arms("itl_s")),
)
"""Metric families of rollouts: name, help text, further labels, samples of one rollout."""


def rollout_families(rollouts: Sequence[RolloutView]) -> Iterator[Metric]:
    """Yield metrics of rollouts that run or ended lately."""
    # A candidate may be tried again; two samples with the same labels would spoil the scrape.
    latest = {
        (view.model, view.candidate): view for view in sorted(rollouts, key=attrgetter("began_at"))
    }
    for name, text, labels, samples in ROWS:
        found = (
            ((*of, *values), value)
            for of, view in latest.items()
            for values, value in samples(view)
        )
        yield family(GAUGE, name, text, (*OF_ROLLOUT, *labels), found)


def route_families(valid_s: Mapping[str, float]) -> Iterator[Metric]:
    """Yield for how long the routes of rollouts are valid here, by public name."""
    text = "Time until a rollout's route expires; at 0 all new requests go to the stable version"
    samples = (((name,), seconds) for name, seconds in valid_s.items())
    yield family(GAUGE, "route_valid_seconds", text, ("model",), samples)
