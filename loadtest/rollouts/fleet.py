"""Rollouts in simulated fleets: production servers and workers of two versions in virtual time.

Requests, their times and failures, and the work of devices come from the servers' own events and
heartbeats instead of formulas.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from ops.rollouts.plan import Objective, RolloutPlan, StepCosts
from server.contract.generation import GenerationRequest
from server.contract.request_events import RequestEnded, RequestEvents
from simulation.deterministic import run
from simulation.fleet import FleetShape, Front, running_fleet
from simulation.modelled import COST, StepCost
from simulation.text import NumberText
from transport.rollout_protocol import FinishedRequest, WorkDone
from triolet.config.routes import NUM_BUCKETS, user_hash
from triolet.errors import RequestError
from triolet.sampling import SamplingParams
from triolet.service_class import Scheduling

from .campaign import LOOK_S, JudgedRollout
from .traffic import BATCH_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.scheduling.links import Links

    from .campaign import RolloutEnd

USERS: Final = 300
RATE: Final = 10.0
PROMPT_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 4
VOCABULARY: Final = 900
DEADLINE_S: Final = 5.0
LONGEST_S: Final = 3_600.0
"""Virtual time after which a rollout must be over."""
COSTS: Final = StepCosts(COST.step_s, COST.row_s, 0.0, COST.token_s)
GOOD: Final = frozenset({"stop", "length"})


class FleetCase(NamedTuple):
    """What the candidate is like.

    Attributes:
      name: name for people.
      cost: cost of its steps.
      deadline_s: deadline of its requests; a low one is missed or refused.
      bake_s: bake time.
    """

    name: str
    cost: StepCost = COST
    deadline_s: float = DEADLINE_S
    bake_s: float = 60.0


class FleetRollout:
    """One rollout in two simulated fleets.

    Args:
      case: what the candidate is like.
      seed: random seed of users, arrivals and the order of tasks.
    """

    def __init__(self, case: FleetCase, seed: int) -> None:
        self._case = case
        self._numbers = random.Random(seed)
        self._seed = seed
        self._plan = RolloutPlan(
            stable="chat-1",
            candidate="chat-2",
            salt=f"{case.name} {seed:016}",
            shares=(0.2, 0.5, 1.0),
            objectives={"errors": Objective(0.99), "ttft": Objective(0.95, 0.08)},
            costs=COSTS,
            bake_s=case.bake_s,
        )
        self._rollout = JudgedRollout(self._plan)
        self._chosen: dict[bytes, tuple[int, str, float]] = {}
        self._ended: list[FinishedRequest] = []

    async def run(self) -> RolloutEnd:
        """Run the rollout to its end."""
        costs = {self._plan.stable: COST, self._plan.candidate: self._case.cost}
        async with AsyncExitStack() as stack:
            fleets = {}
            for number, (version, cost) in enumerate(costs.items()):
                events = RequestEvents()
                events.subscribe(RequestEnded, self._note)
                fleets[version] = await stack.enter_async_context(
                    running_fleet(
                        FleetShape(cost=cost),
                        self._seed + number,
                        Front(NumberText(), None, events),
                    )
                )
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(self._send, fleets, nursery)
            with trio.fail_after(LONGEST_S):
                end = await self._judge(fleets)
            nursery.cancel_scope.cancel()
        return end

    async def _send(self, fleets: Mapping[str, Links], nursery: trio.Nursery) -> None:
        """Send requests of Zipf-distributed users for as long as the rollout lasts."""
        weights = [1 / (1 + user) for user in range(USERS)]
        while True:
            await trio.sleep(self._numbers.expovariate(RATE))
            [user] = self._numbers.choices(range(USERS), weights)
            hashed, now, step = user_hash("", str(user)), trio.current_time(), self._step
            key = str(hashed % NUM_BUCKETS)
            version = self._plan.route(step, step).version_for("", key, now)
            request_id = self._numbers.randbytes(16)
            self._chosen[request_id] = hashed, version, now
            is_candidate = version == self._plan.candidate
            nursery.start_soon(
                self._read,
                fleets[version],
                GenerationRequest(
                    request_id=request_id,
                    prompt_ids=tuple(self._numbers.choices(range(1, VOCABULARY), k=PROMPT_TOKENS)),
                    sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, seed=1, ignore_eos=True),
                    deadline_s=self._case.deadline_s if is_candidate else DEADLINE_S,
                    scheduling=Scheduling(""),
                ),
            )

    @property
    def _step(self) -> int:
        return self._rollout.evidence.step

    async def _read(self, fleet: Links, request: GenerationRequest) -> None:
        try:
            stream = fleet.submit(request)
        except RequestError:
            self._end(request.request_id, "refused", {})
            return
        async for _ in stream:
            pass

    def _note(self, event: RequestEnded) -> None:
        usage = event.usage
        seconds = {} if usage.ttft_s is None else {"ttft": usage.ttft_s - usage.queue_s}
        self._end(event.facts.request_id, event.outcome, seconds)

    def _end(self, request_id: bytes, outcome: str, seconds: dict[str, float]) -> None:
        user, version, chosen_at = self._chosen.pop(request_id)
        missed = frozenset[str]() if outcome in GOOD else frozenset({"errors"})
        now = trio.current_time()
        self._ended.append(FinishedRequest(user, version, chosen_at, now, missed, seconds))

    async def _judge(self, fleets: Mapping[str, Links]) -> RolloutEnd:
        """Look every two seconds until the judge ends the rollout."""
        end, slot = None, 0
        done = {version: fleet.status().work for version, fleet in fleets.items()}
        while end is None:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            if int(now // BATCH_S) > slot:
                slot = int(now // BATCH_S)
                before, done = done, {name: one.status().work for name, one in fleets.items()}
                stable, canary = (
                    _difference(done[name], before[name])
                    for name in (self._plan.stable, self._plan.candidate)
                )
                self._rollout.evidence.add_work(COSTS, slot, stable, canary)
            ended, self._ended = self._ended, []
            end = self._rollout.look(ended, now)
        return end


def _difference(done: WorkDone, before: WorkDone) -> WorkDone:
    return WorkDone(
        done.busy_s - before.busy_s,
        done.steps - before.steps,
        done.rows - before.rows,
        0,
        done.prompt_tokens - before.prompt_tokens,
    )


def roll_out_in_fleets(case: FleetCase, seed: int) -> RolloutEnd:
    """Run one rollout in virtual time."""
    return run(FleetRollout(case, seed).run, seed)
