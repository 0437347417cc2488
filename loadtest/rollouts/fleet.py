"""Rollouts in simulated fleets: production servers and workers of two versions in virtual time.

Users, arrivals and crashes are those of a scenario. Whether a request is served, its times, and the
work of devices come from the servers' own events and heartbeats instead of formulas. A request that
should fail gets a deadline that no server can keep.
"""

from __future__ import annotations

import math
import random
from contextlib import AsyncExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from ops.rollouts.plan import Objective, StepCosts
from server.contract.generation import AssignedVersion, GenerationRequest
from server.contract.request_events import RequestEnded, RequestEvents
from server.rollouts.collector import RolloutCollector
from simulation.deterministic import run
from simulation.fleet import FleetShape, Front, running_fleet
from simulation.modelled import COST, StepCost
from simulation.text import NumberText
from transport.rollout_protocol import RolloutPhase, RolloutView
from triolet.errors import RequestError
from triolet.sampling import SamplingParams
from triolet.service_class import Scheduling

from .campaign import GOLDEN_DIFFERENCE, LOOK_S, JudgedRollout, plan_of
from .traffic import BATCH_S, WORKERS, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ops.rollouts.plan import RolloutPlan
    from server.scheduling.links import Links

    from .campaign import RolloutEnd
    from .traffic import Scenario

PROMPT_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 2
VOCABULARY: Final = 900
DEADLINE_S: Final = 5.0
MISSED_S: Final = 0.0005
"""Deadline of a request that should fail: over before a worker has its prompt, so that it takes no
device time. Otherwise errors would also be costs."""
TTFT_LIMIT_S: Final = 0.08
LONGEST_S: Final = 3_600.0
"""Virtual time after which a rollout must be over."""
COSTS: Final = StepCosts(COST.step_s, COST.row_s, 0.0, COST.token_s)
MODEL: Final = "chat"
"""Public name of both versions."""


class FleetRollout:
    """One rollout in two simulated fleets.

    Args:
      scenario: what happens. Its candidate computes prompts `slower`, and is `dearer` in each step.
      seed: random seed of users, arrivals and the order of tasks.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._numbers = random.Random(seed)
        self._seed = seed
        self._plan = msgspec.structs.replace(
            plan_of(scenario, seed),
            objectives={"errors": Objective(0.99), "ttft": Objective(0.95, TTFT_LIMIT_S)},
            costs=COSTS,
        )
        self._traffic = Traffic(scenario, self._plan, seed)
        self._rollout = JudgedRollout(self._plan)
        self._collector = RolloutCollector(wall=trio.current_time)
        self._collector.hear((_view(self._plan),))
        self._crashes: dict[str, list[Callable[[], None]]] = {}

    async def run(self) -> RolloutEnd:
        """Run the rollout to its end."""
        dearer, slower = self._scenario.dearer, self._scenario.slower
        own = StepCost(COST.step_s * dearer, COST.row_s * dearer, COST.token_s * dearer * slower)
        costs = {self._plan.stable: COST, self._plan.candidate: own}
        async with AsyncExitStack() as stack:
            fleets = {}
            for number, (version, cost) in enumerate(costs.items()):
                events = RequestEvents()
                events.subscribe(RequestEnded, self._collector.ended)
                crashes = self._crashes[version] = []
                fleets[version] = await stack.enter_async_context(
                    running_fleet(
                        FleetShape(cost=cost),
                        self._seed + number,
                        Front(NumberText(), None, events),
                        crashes,
                    )
                )
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(self._send, fleets, nursery)
            with trio.fail_after(LONGEST_S):
                end = await self._judge(fleets)
            nursery.cancel_scope.cancel()
        return end

    async def _send(self, fleets: Mapping[str, Links], nursery: trio.Nursery) -> None:
        """Send the scenario's requests, each at its time, for as long as the rollout lasts."""
        until = math.ceil(trio.current_time())
        while True:
            due = sorted(self._traffic.arrivals(until, until + 1), key=attrgetter("chosen_at"))
            until += 1
            for one in due:
                await trio.sleep_until(one.chosen_at)
                request = GenerationRequest(
                    request_id=self._numbers.randbytes(16),
                    prompt_ids=tuple(self._numbers.choices(range(1, VOCABULARY), k=PROMPT_TOKENS)),
                    sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, seed=1, ignore_eos=True),
                    deadline_s=MISSED_S if one.missed else DEADLINE_S,
                    scheduling=Scheduling(""),
                    assigned=AssignedVersion(MODEL, one.version, one.user, one.chosen_at),
                )
                nursery.start_soon(self._read, fleets[one.version], request)
            await trio.sleep_until(until)

    async def _read(self, fleet: Links, request: GenerationRequest) -> None:
        try:
            stream = fleet.submit(request)
        except RequestError as error:
            assert request.assigned is not None, "each request has a version"
            self._collector.refused(request.assigned, error.status)
            return
        async for _ in stream:
            pass

    async def _judge(self, fleets: Mapping[str, Links]) -> RolloutEnd:
        """Look every two seconds until the judge ends the rollout."""
        crashed_at = -math.inf
        end, slot, looked_at = None, 0, LOOK_S * math.ceil(trio.current_time() / LOOK_S)
        done = {version: fleet.status().work for version, fleet in fleets.items()}
        while end is None:
            now, evidence = looked_at + LOOK_S, self._rollout.evidence
            await trio.sleep_until(now)
            if self._traffic.step != evidence.step:
                self._traffic.begin_step(evidence.step)
            incidents = self._traffic.incidents(looked_at, now)
            evidence.add_incidents(self._plan, incidents, self._traffic.on_canary / WORKERS)
            for incident in incidents:  # the worker starts again at once
                self._numbers.choice(self._crashes[incident.version])()
                crashed_at = now
            looked_at = now
            if now // BATCH_S > slot:
                slot = now // BATCH_S
                before, done = done, {name: one.status().work for name, one in fleets.items()}
                stable, canary = (
                    done[name].since(before[name])
                    for name in (self._plan.stable, self._plan.candidate)
                )
                if now - crashed_at > BATCH_S:  # a new process counts its work from zero
                    evidence.add_work(COSTS, stable, canary)
            if self._scenario.golden_step and evidence.step == self._scenario.golden_step:
                evidence.golden_difference = GOLDEN_DIFFERENCE
            messages = self._collector.take("server")
            ended = [request for message in messages for request in message.requests]
            end = self._rollout.look(ended, now)
        return end


def _view(plan: RolloutPlan) -> RolloutView:
    """Return what servers are told of the rollout: they collect for its model."""
    return RolloutView(
        "1", MODEL, plan.stable, plan.candidate, "", RolloutPhase.CANARY, 1, plan.shares, 0.0, ""
    )


def roll_out_in_fleets(scenario: Scenario, seed: int) -> RolloutEnd:
    """Run one rollout in virtual time."""
    return run(FleetRollout(scenario, seed).run, seed)
