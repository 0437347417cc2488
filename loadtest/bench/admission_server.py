"""The server under test of the admission benchmark, with a stopwatch around each admission step.

It runs in this process without a socket, over simulated workers. Requests arrive as ASGI calls.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import trio

from server import app
from server.api import auto, generate
from server.api.limits import current_scheduling
from server.api.openai import chat as completions
from server.api.request_scope import SCOPE_KEY, ClientConnection, RequestScope
from server.api.served_models import ModelTable, ServedModel
from server.api.services import Services
from server.app import build_app
from server.contract.generation import GenerationRequest
from server.contract.request_events import RequestEnded, RequestEvents
from server.jobs.runner import receiving
from server.metrics.access_log import write_access_line
from server.metrics.metrics import Metrics
from server.scheduling.attempt import Attempts
from server.scheduling.request import RequestTable
from server.scheduling.requests import Requests
from server.tenants.opening import opened_quotas
from server.tenants.quotas import AskedTokens
from server.tenants.tenancy import Tenancy, enter_tenant
from server.text.grammars import Grammars
from server.text.process import at_once
from server.text.tokenizer import TextModel
from simulation.fleet import FleetShape, Front, running_fleet
from simulation.modelled import COST, StepCost
from triolet.config import (
    MEMORY,
    AdmissionConfig,
    BrownoutConfig,
    GuardConfig,
    OverloadConfig,
    QueueConfig,
    QuotaConfig,
    ResponseCacheConfig,
    ServerConfig,
    SloConfig,
)
from triolet.ids import new_request_id
from triolet.sampling import SamplingParams
from triolet.service_class import ServiceClass
from triolet.tenants.api_keys import digest_of
from triolet.tenants.plans import ANONYMOUS, Plan, Tenant, TenantKey, Tenants
from triolet.units import MIB, MILLISECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from server.scheduling.links import Links


KEY, PARSE, SUBMIT, DISPATCH = "key", "parse", "submit", "dispatch, at once"
STEPS: Final = (KEY, "fields", "early", "request", "reserve", SUBMIT)
"""Admission steps in order. `PARSE` follows the first; `DISPATCH` happens within the last, if a
worker has room. Neither counts as part of the path into the queue."""
TAKEN, LOOKED, SETTLED, SWEPT = "dispatch, each taken", "dispatch, nobody", "settle", "sweep"


@dataclass(slots=True)
class Lap:
    """The timed path of one request into the queue.

    Attributes:
      began_ns: time of the key check.
      ended_ns: time when it was queued or refused; 0 before.
      steps: duration of each step, in nanoseconds.
      is_refused: whether it was refused.
    """

    began_ns: int
    ended_ns: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    is_refused: bool = False

    @property
    def whole_ns(self) -> int:
        """Duration of the whole path, except reading the body and dispatch."""
        others = self.steps.get(PARSE, 0) + self.steps.get(DISPATCH, 0)
        return self.ended_ns - self.began_ns - others


_LAP: Final[ContextVar[Lap | None]] = ContextVar("lap", default=None)


class Stopwatch:
    """Times the steps of a server.

    Attributes:
      laps: paths of requests that were queued or refused.
      taken_ns: durations of steps that no single request waits for, by name.
    """

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self.taken_ns: dict[str, list[float]] = {
            name: [] for name in (TAKEN, LOOKED, SETTLED, SWEPT)
        }

    def forget(self) -> None:
        """Drop the laps measured so far, which warmed up the server."""
        self.laps.clear()
        for taken in self.taken_ns.values():
            taken.clear()

    @contextmanager
    def running(self) -> Iterator[Stopwatch]:
        """Time the steps in this process while the context is active."""
        with ExitStack() as stack:

            def put(place: object, name: str, around: Callable[[Any], object]) -> None:
                step = getattr(place, name)
                stack.callback(setattr, place, name, step)
                setattr(place, name, around(step))

            put(app, "check_request", self._begun)
            put(completions, "read_fields", partial(self._async, PARSE))
            put(auto, "check_fields", partial(self._plain, "fields"))
            put(auto, "refuse_early", partial(self._plain, "early"))
            put(completions, "own_requests", partial(self._plain, "request"))
            put(generate, "reserved", partial(self._async, "reserve"))
            put(generate, "submit_all", partial(self._plain, SUBMIT))
            put(Attempts, "dispatch", self._dispatch)
            put(Requests, "sweep", partial(self._other, SWEPT))
            for end in ("finish", "fail"):
                put(RequestTable, end, partial(self._other, SETTLED))
            yield self

    def _begun(self, check: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        timed = self._async(KEY, check)

        async def begin(*args: Any) -> None:  # noqa: ANN401 (the step's own arguments)
            _LAP.set(Lap(perf_counter_ns()))
            await timed(*args)

        return begin

    def _plain(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:  # noqa: ANN401
            with self._timing(name):
                return step(*args, **more)

        return timed

    def _async(self, name: str, step: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def timed(*args: Any, **more: Any) -> Any:  # noqa: ANN401
            with self._timing(name):
                return await step(*args, **more)

        return timed

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        began_ns = perf_counter_ns()
        try:
            yield
        except Exception:
            self._note(name, began_ns, is_refused=True)
            raise
        self._note(name, began_ns)

    def _note(self, name: str, began_ns: int, *, is_refused: bool = False) -> None:
        now_ns, lap = perf_counter_ns(), _LAP.get()
        if lap is None or lap.ended_ns:
            return
        lap.steps[name] = now_ns - began_ns
        if name == SUBMIT:
            lap.steps[SUBMIT] -= lap.steps.get(DISPATCH, 0)
        if is_refused or name == SUBMIT:
            lap.ended_ns, lap.is_refused = now_ns, is_refused
            self.laps.append(lap)

    def _other(self, name: str, step: Callable[..., None]) -> Callable[..., None]:
        taken = self.taken_ns[name]

        def timed(*args: Any) -> None:  # noqa: ANN401
            began_ns = perf_counter_ns()
            step(*args)
            taken.append(perf_counter_ns() - began_ns)

        return timed

    def _dispatch(self, dispatch: Callable[..., None]) -> Callable[..., None]:
        def timed(attempts: Attempts, now: float) -> None:
            before, began_ns = len(attempts.queue), perf_counter_ns()
            dispatch(attempts, now)
            took_ns, taken = perf_counter_ns() - began_ns, before - len(attempts.queue)
            lap = _LAP.get()
            if lap is not None and not lap.ended_ns:
                lap.steps[DISPATCH] = took_ns
            if taken > 0:
                self.taken_ns[TAKEN].append(took_ns / taken)
            elif before:
                self.taken_ns[LOOKED].append(took_ns)

        return timed


MODEL: Final = "demo"
PATH: Final = "/v1/completions"
NUM_TENANTS: Final = 200
PROMPT_TOKENS: Final = 100
MAX_TOKENS: Final = 4
FIRST_ID, LAST_ID = 256, 1000
"""Token ids of the model without special tokens, so that no two prompts have a common prefix."""
LONG_S: Final = 1e6
"""Deadlines of requests that must be accepted at any queue length."""
QUICK: Final = StepCost(1 * MILLISECONDS, 0.01 * MILLISECONDS, 0.01 * MILLISECONDS)
"""Step costs for runs in real time."""
SHORT_SLO_S: Final = 2.0
"""Deadline of the sheddable class: it is refused if anything waits."""
MAX_QUEUED: Final = 100_000
LARGE: Final = 1e12
"""Limits that are set but never reached."""
TIERS: Final = ("auto", "auto", "priority", "flex")
OTHERS: Final = ("auto", "auto", "auto", "priority")
"""Classes of the requests that fill the queue: sheddable ones would be refused."""


@dataclass(frozen=True, slots=True)
class Form:
    """Configuration of the server under test.

    Attributes:
      is_on: whether it has tenants, quotas, fair queue, admission, brownout, guard and response
        cache, or none of them.
      limits: store of the quota accounts.
      is_real: use real time, which Redis requires.
      seed: random seed.
    """

    is_on: bool = True
    limits: str = MEMORY
    is_real: bool = False
    seed: int = 0

    @property
    def cost(self) -> StepCost:
        """Step costs of its workers."""
        return QUICK if self.is_real else COST


def config_of(form: Form) -> ServerConfig:
    """Return the server's config."""
    is_on = form.is_on
    return ServerConfig(
        model_dir=str(files("triolet") / "demo"),
        model_name=MODEL,
        prefill_addresses=(),
        decode_addresses=(),
        default_deadline_s=LONG_S,
        max_queued_requests=MAX_QUEUED,
        queue=QueueConfig(fair=is_on),
        response_cache=ResponseCacheConfig(max_bytes=16 * MIB if is_on else 0),
        overload=OverloadConfig(
            slo=SloConfig(critical_s=LONG_S, default_s=LONG_S, sheddable_s=SHORT_SLO_S),
            admission=AdmissionConfig(is_on=is_on),
            brownout=BrownoutConfig(is_on=is_on),
            guard=GuardConfig(is_on=is_on),
        ),
    )


def key_of(number: int) -> str:
    """Return a tenant's key. No server that accepts it listens on a port."""
    return f"key-of-tenant-{number}-for-this-benchmark-only"


def tenants() -> Tenants:
    """Return many tenants with all limits; every second one also has concurrency limits."""
    plans = {
        name: Plan(
            name,
            weight=weight,
            classes=(
                ServiceClass.DEFAULT,
                ServiceClass.CRITICAL,
                ServiceClass.SHEDDABLE,
                ServiceClass.BATCH,
            ),
            requests_per_minute=LARGE,
            tokens_per_minute=LARGE,
            max_concurrent=10**9,
            max_context_tokens=400,
            max_output_tokens=100,
            max_running=max_running,
            kv_share=kv_share,
            budget=LARGE,
        )
        for name, weight, max_running, kv_share in (
            ("free", 1.0, None, 1.0),
            ("bounded", 3.0, 1000, 0.9),
        )
    }
    all_tenants = (
        Tenant(
            f"tenant-{number}",
            plans["bounded" if number % 2 else "free"],
            keys=(TenantKey(digest_of(key_of(number))),),
            secret=number.to_bytes(32, "big"),
        )
        for number in range(NUM_TENANTS)
    )
    return Tenants(all_tenants, plans, {})


@dataclass
class RunningServer:
    """A running server under test.

    Attributes:
      form: its configuration.
      services: its components.
      fleet: its simulated workers.
      app: its ASGI application.
      statuses: HTTP statuses of the answers, in order of arrival.
    """

    form: Form
    services: Services
    fleet: Links
    app: Callable[..., Awaitable[None]]
    statuses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = random.Random(self.form.seed)

    async def queue_other(self) -> None:
        """Queue a request that is not timed; its answer is not read.

        Raises:
          RequestError: the request was refused.
        """
        tenant = self._anybody()
        enter_tenant(tenant)
        tier = self._numbers.choice(OTHERS)
        request = GenerationRequest(
            new_request_id(),
            tuple(self._prompt()),
            SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True),
            LONG_S,
            scheduling=current_scheduling(tier),
            key=self._numbers.getrandbits(60),
        )
        asked = AskedTokens(request.request_id, PROMPT_TOKENS, MAX_TOKENS)
        with await self.services.quotas.reserve(tenant, [asked]):
            self.fleet.submit(request)

    async def ask(self) -> None:
        """Send a request over ASGI and wait for the whole answer."""
        fields = {
            "model": MODEL,
            "prompt": self._prompt(),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "service_tier": self._numbers.choice(TIERS),
        }
        body = json.dumps(fields).encode()

        async def send(message: dict[str, Any]) -> None:
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])

        await self.app(self._scope(len(body)), receiving(body), send)

    def _scope(self, num_bytes: int) -> dict[str, Any]:
        headers = {
            "host": "127.0.0.1",
            "content-type": "application/json",
            "content-length": str(num_bytes),
        }
        if self.form.is_on:
            headers["authorization"] = f"Bearer {key_of(self._number())}"
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": encoded,
            "client": ("127.0.0.1", 1),
            "server": None,
            "extensions": {},
            "state": {SCOPE_KEY: RequestScope(ClientConnection(), encoded)},
        }

    def _prompt(self) -> list[int]:
        return self._numbers.choices(range(FIRST_ID, LAST_ID), k=PROMPT_TOKENS)

    def _number(self) -> int:
        """Return a random tenant; a few tenants send most requests."""
        return min(int(self._numbers.expovariate(8.0) * NUM_TENANTS), NUM_TENANTS - 1)

    def _anybody(self) -> Tenant:
        if not self.form.is_on:
            return ANONYMOUS
        return self.services.tenancy.tenant_named(f"tenant-{self._number()}")


@asynccontextmanager
async def running_server(form: Form) -> AsyncIterator[RunningServer]:
    """Run a server. At its end no request or reservation may be left.

    In virtual time if its accounts are in memory: `simulation.deterministic.run`.
    """
    config = config_of(form)
    text = TextModel.load(config.model_dir)
    metrics = Metrics(MODEL, config.metrics_compat)
    tenancy = Tenancy(tenants() if form.is_on else None)
    prices = partial(tenancy.prices_of, MODEL)
    grammars = Grammars(
        Path(config.model_dir) / "tokenizer.json", text.eos_token_ids, config.grammar, at_once
    )
    with opened_quotas(QuotaConfig(limits=form.limits), metrics.quotas, prices) as quotas:
        shape = FleetShape(cost=form.cost, server=config)
        events = RequestEvents(quotas.price)
        metrics.fleet.subscribe_to(events)
        quotas.subscribe_to(events)
        events.subscribe(RequestEnded, write_access_line)
        front = Front(text, metrics.fleet, events)
        async with running_fleet(shape, form.seed, front) as fleet, trio.open_nursery() as tasks:
            model = ServedModel(config, fleet, text, grammars)
            services = Services(
                config, ModelTable([model]), metrics, tenancy=tenancy, quotas=quotas
            )
            await tasks.start(quotas.store.run)
            server = RunningServer(form, services, fleet, build_app(services))
            yield server
            fleet.cancel_tenants({tenant.name for tenant in tenancy.all_tenants})
            fleet.check_accounting()
            assert not quotas.num_open, "a tenant was not charged"
            tasks.cancel_scope.cancel()
