"""The rollouts of the campaign, how they should end, and the comparison with how they ended."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from ops.rollouts.plan import GUARD_BUDGET

from .campaign import roll_out
from .fleet import roll_out_in_fleets
from .traffic import Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .campaign import RolloutEnd


class Expectation(NamedTuple):
    """How the rollouts of a scenario should end.

    Attributes:
      scenario: the scenario.
      runs: number of rollouts; their seeds begin with 0.
      ends: ends that are right.
      at_least: share of rollouts that end so.
      median_s: longest median time of these; 0 for any.
      median_requests: most canary requests in the median; 0 for any.
      is_of_fleets: whether servers and workers are simulated too.
    """

    scenario: Scenario
    runs: int
    ends: tuple[str, ...]
    at_least: float
    median_s: float = 0.0
    median_requests: int = 0
    is_of_fleets: bool = False

    def roll_out(self, seed: int) -> RolloutEnd:
        """Run one rollout, with generated traffic or in simulated fleets."""
        return (roll_out_in_fleets if self.is_of_fleets else roll_out)(self.scenario, seed)


class Summary(NamedTuple):
    """The rollouts of one scenario.

    Attributes:
      expected: what they should be.
      results: what they were.
    """

    expected: Expectation
    results: tuple[RolloutEnd, ...]

    @property
    def right(self) -> list[RolloutEnd]:
        """The rollouts that ended as they should."""
        return [one for one in self.results if one.action in self.expected.ends]

    @property
    def median_s(self) -> float:
        """The median time of these."""
        return statistics.median([one.seconds for one in self.right] or [0.0])

    @property
    def median_requests(self) -> float:
        """The median of their canary requests."""
        return statistics.median([one.canary_requests for one in self.right] or [0])

    @property
    def failures(self) -> list[str]:
        """What is not as it should be."""
        expected, name = self.expected, self.expected.scenario.name
        found = [f"{name}: {rule}" for one in self.results for rule in one.violations]
        if len(self.right) < expected.at_least * len(self.results):
            found.append(f"{name}: {len(self.right)} of {len(self.results)} ended as they should")
        if expected.median_s and self.median_s > expected.median_s:
            found.append(f"{name}: a median of {self.median_s:g} s; at most {expected.median_s:g}")
        if expected.median_requests and self.median_requests > expected.median_requests:
            found.append(f"{name}: a median of {self.median_requests:g} canary requests")
        return found

    @property
    def actions(self) -> Counter[str]:
        """Number of rollouts by end."""
        return Counter(one.action for one in self.results)

    @property
    def reasons(self) -> Counter[str]:
        """Number of rollouts that were not promoted, by reason."""
        return Counter(one.reason for one in self.results if one.action != "promoted")


MAX_FALSE: Final = 0.01
"""Share of rollouts of equal versions that may be rolled back."""
MIN_PROMOTED: Final = 0.85
"""Share of them that should be promoted; the others are paused for a person."""
ZIPF: Final = Scenario("", 2_000, is_skewed=True)
LONG: Final = ZIPF._replace(has_bursts=True, bake_s=300.0)
EQUAL: Final = tuple(
    Expectation(scenario, runs, ("promoted",), 0.0)
    for scenario, runs in (
        (Scenario("equal: 400 equal users"), 150),
        (ZIPF._replace(name="equal: 2,000 Zipf users"), 150),
        (ZIPF._replace(name="equal: bursts of failures", has_bursts=True), 150),
        (ZIPF._replace(name="equal: ramps, shifting mix", is_shifting=True), 150),
        (ZIPF._replace(name="equal: largest user times out", has_timeouts=True), 150),
        (
            ZIPF._replace(
                name="equal: all of these", has_bursts=True, is_shifting=True, has_timeouts=True
            ),
            150,
        ),
        (Scenario("equal: a worker crashes three times", broken_s=60.0), 60),
        (
            Scenario("equal: begins with 1 %", 5_000, rate=60.0, shares=(0.01, 0.1, 0.5, 1.0)),
            40,
        ),
    )
)
"""A thousand rollouts of equal versions."""
FOUND: Final = ("rollback",)
WORSE: Final = (
    Expectation(Scenario("errors 1 to 90 %", errors=0.9), 100, FOUND, 1.0, 9, 40),
    Expectation(Scenario("errors 1 to 20 %", errors=0.2), 100, FOUND, 0.96, 30, 104),
    Expectation(LONG._replace(name="errors 1 to 20 %, Zipf", errors=0.2), 50, FOUND, 0.96, 70, 340),
    Expectation(Scenario("errors 1 to 5 %", errors=0.05), 100, ("rollback", "pause"), 0.9),
    Expectation(
        LONG._replace(name="errors 1 to 5 %, Zipf", errors=0.05), 60, ("rollback", "pause"), 0.9
    ),
    Expectation(
        Scenario("errors 1 to 50 % with the last step", errors=0.5, errors_from=3), 50, FOUND, 0.9
    ),
    Expectation(Scenario("first token 50 % later", slower=1.5), 100, FOUND, 0.96),
    Expectation(Scenario("costs 2 times as much", dearer=2.0), 50, FOUND, 1.0),
    Expectation(Scenario("costs 1.2 times as much", dearer=1.2), 30, (*FOUND, "pause"), 1.0),
    Expectation(Scenario("workers crash every 10 s", crashes=60.0), 50, FOUND, 0.96),
    Expectation(Scenario("golden prompt differs", golden_step=2), 20, FOUND, 0.9),
    Expectation(Scenario("outage of both versions", outage_step=2), 50, ("step back",), 0.9),
    Expectation(
        Scenario("both bad before", errors=0.3, stable_errors=0.3, max_step_s=300.0),
        20,
        ("pause",),
        1.0,
    ),
    Expectation(Scenario("too few users", 30, rate=0.5, max_step_s=300.0), 50, ("pause",), 1.0),
)
"""Versions that should not be promoted, and the least share that ends so."""

FLEET: Final = Scenario(
    "", 300, is_skewed=True, rate=10.0, shares=(0.5, 1.0), bake_s=20.0, max_step_s=400.0
)
"""Few requests and short steps: a request in simulated fleets takes 2 ms to compute."""
NOT_BLAMED: Final = ("promoted", "pause")
FOUND_OR_PAUSED: Final = (*FOUND, "pause")


def _in_fleets(scenario: Scenario, ends: tuple[str, ...], at_least: float = 1.0) -> Expectation:
    named = scenario._replace(name=f"fleet: {scenario.name}")
    return Expectation(named, 20, ends, at_least, is_of_fleets=True)


FLEETS: Final = (
    _in_fleets(FLEET._replace(name="equal, Zipf users"), NOT_BLAMED),
    _in_fleets(FLEET._replace(name="equal, bursts of failures", has_bursts=True), NOT_BLAMED),
    _in_fleets(FLEET._replace(name="equal, ramps, shifting mix", is_shifting=True), NOT_BLAMED),
    _in_fleets(FLEET._replace(name="equal, largest user times out", has_timeouts=True), NOT_BLAMED),
    _in_fleets(
        FLEET._replace(
            name="equal, all of these", has_bursts=True, is_shifting=True, has_timeouts=True
        ),
        NOT_BLAMED,
    ),
    _in_fleets(
        FLEET._replace(name="equal, a worker crashes three times", broken_s=60.0), NOT_BLAMED
    ),
    _in_fleets(FLEET._replace(name="errors 1 to 90 %", errors=0.9), FOUND),
    _in_fleets(FLEET._replace(name="errors 1 to 20 %", errors=0.2), FOUND, 0.9),
    _in_fleets(FLEET._replace(name="errors 1 to 5 %", errors=0.05), FOUND_OR_PAUSED, 0.9),
    _in_fleets(
        FLEET._replace(name="errors 1 to 50 % with the last step", errors=0.5, errors_from=2),
        FOUND,
        0.9,
    ),
    _in_fleets(FLEET._replace(name="prompts 5 times as slow", slower=5.0), FOUND),
    _in_fleets(FLEET._replace(name="costs 3 times as much", dearer=3.0), FOUND_OR_PAUSED),
    _in_fleets(FLEET._replace(name="costs 1.2 times as much", dearer=1.2), FOUND_OR_PAUSED),
    _in_fleets(FLEET._replace(name="workers crash every 10 s", crashes=60.0), FOUND, 0.9),
    _in_fleets(FLEET._replace(name="golden prompt differs", golden_step=1), FOUND),
    _in_fleets(
        FLEET._replace(name="outage of both versions", outage_step=2, shares=(0.25, 0.5, 1.0)),
        ("step back",),
        0.9,
    ),
    _in_fleets(
        FLEET._replace(name="both bad before", errors=0.5, stable_errors=0.5, max_step_s=90.0),
        ("pause",),
    ),
    _in_fleets(
        FLEET._replace(name="too few users", users=30, rate=0.5, max_step_s=90.0), ("pause",)
    ),
)
"""Rollouts in simulated fleets."""
EVENTS: Final = tuple(
    one._replace(
        scenario=one.scenario._replace(name=one.scenario.name.replace("fleet", "events")),
        is_of_fleets=False,
    )
    for one in FLEETS
)
"""The same scenarios with generated events, which must end as in fleets."""
UNSEEN: Final = (
    Expectation(LONG._replace(name="unseen: errors 1 to 2 %", errors=0.02), 30, FOUND, 0.0),
    Expectation(Scenario("unseen: first token 10 % later", slower=1.1), 50, FOUND, 0.0),
    Expectation(Scenario("unseen: crashes 10 times as often", crashes=10.0), 50, FOUND, 0.0),
    Expectation(Scenario("unseen: a broken machine", broken_s=600.0), 100, ("promoted",), 0.0),
)
"""What the judge finds rarely, and a broken machine, for which it blames a version."""


def judged(summaries: Sequence[Summary]) -> list[str]:
    """Return what is not as it should be, of single scenarios and of equal versions together."""
    failures = [failure for one in summaries for failure in one.failures]
    actions = {one.expected: one.actions for one in summaries}
    for fleet, events in zip(FLEETS, EVENTS, strict=True):
        if {fleet, events} <= actions.keys():
            usual = [max(actions[one], key=actions[one].__getitem__) for one in (fleet, events)]
            if usual[0] != usual[1]:
                said = f"mostly {usual[0]}, and mostly {usual[1]} with generated events"
                failures.append(f"{fleet.scenario.name}: {said}")
    ends = [end for one in summaries if one.expected in EQUAL for end in one.results]
    if not ends:
        return failures
    rolled_back = [end for end in ends if end.action in {"rollback", "step back"}]
    by_guard = [end for end in rolled_back if end.reason.startswith("guard")]
    promoted = sum(end.action == "promoted" for end in ends)
    if len(rolled_back) > MAX_FALSE * len(ends):
        failures.append(f"equal versions: {len(rolled_back)} of {len(ends)} rolled back")
    if len(by_guard) > GUARD_BUDGET * len(ends):
        failures.append(f"equal versions: the guard rolled back {len(by_guard)} of {len(ends)}")
    if promoted < MIN_PROMOTED * len(ends):
        failures.append(f"equal versions: {promoted} of {len(ends)} promoted")
    return failures
