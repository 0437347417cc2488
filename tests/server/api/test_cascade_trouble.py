"""The cascade of `model: auto`: what waits, breaks or is refused, and what is charged."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import trio
from structlog.testing import capture_logs

from server.api.cascade import Prepared
from server.tenants.accounts import NANOS, limits_of
from server.tenants.memory_store import MemoryStore, SpendWatch
from server.tenants.quotas import Quotas
from server.tenants.tenancy import Tenancy
from tests.server.api.test_auto import Observed, ask
from tests.server.api.test_cascade import HEADER, TAKES_ALL, TAKES_NONE, asking, judged, kept
from tests.server.api.test_many_models import CODE, TURN, CodeText
from tests.server.support.fakes import (
    ChargingFleet,
    FakeFleet,
    FakeGeneration,
    answer_hello,
    by_hand,
)
from tests.server.support.surface import MODEL
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from triolet.config import QuotaConfig
from triolet.errors import RequestError, invalid_request, overloaded, server_error
from triolet.tenants.plans import Plan, Prices

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.contract.generation import CancelReason, GenerationRequest


class StuckText(CodeText):
    """Tokenises for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = trio.Event()

    async def encode(self, *args: Any, **more: Any) -> tuple[int, ...]:  # noqa: ANN401
        self.has_begun.set()
        await trio.sleep_forever()
        raise AssertionError


async def test_a_prompt_that_the_next_model_tokenises_too_slowly_keeps_the_small_answer() -> None:
    async with judged(TAKES_NONE, code_text=StuckText(), cascade={"plan_s": 0.02}) as models:
        await kept(models)


class Broken(RuntimeError):
    """A bug of ours."""


async def test_an_accepted_answer_that_is_kept_has_nothing_of_the_next_models_plan() -> None:
    async with judged(TAKES_ALL) as models:
        await ask(models, headers={"idempotency-key": "one"})
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is Prepared]
        by_model = [one.model is models.server.services.models.named(CODE) for one in found]
        assert by_model
        assert not any(by_model)


class BrokenText(CodeText):
    """Has a bug."""

    async def encode(self, *args: Any, **more: Any) -> tuple[int, ...]:  # noqa: ANN401
        raise Broken


async def test_a_bug_in_the_next_models_plan_keeps_the_small_answer() -> None:
    async with judged(TAKES_NONE, code_text=BrokenText()) as models:
        with capture_logs() as lines:
            await kept(models)
    (line,) = (line for line in lines if line["event"] == "cascade_failed")
    assert isinstance(line["exc_info"], Broken)


class PickyText(CodeText):
    """Tells a client what it does not like."""

    async def encode(self, text: str, *args: Any, **more: Any) -> tuple[int, ...]:  # noqa: ANN401
        raise invalid_request(f"not this: {text}", "messages")


async def test_the_log_says_why_the_next_model_was_not_asked_without_words_of_the_prompt() -> None:
    async with judged(TAKES_NONE, code_text=PickyText()) as models:
        with capture_logs() as lines:
            await kept(models)
    (line,) = (line for line in lines if line["event"] == "cascade_refused")
    assert (line["above"], line["code"]) == (MODEL, "invalid_request_error")
    assert TURN["content"] not in str(lines)


LONG_PLAN = {"plan_s": 9.0}
"""Longer than the tests below may take."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "one"}])
async def test_an_accepted_answer_does_not_wait_for_the_next_models_plan(
    headers: dict[str, str], *, stream: bool
) -> None:
    async with judged(TAKES_ALL, code_text=StuckText(), cascade=LONG_PLAN) as models:
        with trio.fail_after(5):
            answer = await ask(models, stream=stream, headers=headers)
        assert answer.headers[HEADER].startswith("accepted")


async def test_neither_deadline_nor_keep_alive_waits_for_the_next_models_plan() -> None:
    fleet = FakeFleet(by_hand)
    changes = {"fleet": fleet, "code_text": StuckText(), "cascade": LONG_PLAN}
    async with judged(TAKES_NONE, keep_alive_s=0.02, **changes) as models:
        with trio.fail_after(5):
            async with asking(models, stream=True) as client:
                await client.until(b": keep-alive\n\n")
            headers = {"x-request-timeout-ms": "20"}
            async with asking(models, headers=headers) as client:
                generation = await models.demo.nth(1)
                generation.say("abcd")
                generation.fail(RequestError("late", status=504, code="deadline_exceeded"))
                assert (await client.answer()).status == 504


async def test_a_cancel_on_a_socket_does_not_wait_for_the_next_models_plan() -> None:
    text = StuckText()
    changes = {"fleet": FakeFleet(by_hand), "code_text": text, "cascade": LONG_PLAN}
    async with judged(TAKES_NONE, **changes) as models:
        socket = await open_socket(models.server)
        async with socket.client.stream:
            await socket.send({"type": "response.create", "model": "auto", "input": "hi"})
            (await models.demo.nth(0)).say("abcd")
            await text.has_begun.wait()
            await socket.send({"type": "response.cancel"})
            with trio.fail_after(5):
                await socket.until("response.incomplete")


def _fail(generation: FakeGeneration) -> None:
    generation.fail(server_error())


class EndingFleet(ChargingFleet):
    """Tells of failed and cancelled sequences too."""

    def begin(self, request: GenerationRequest) -> FakeGeneration:
        generation = super().begin(request)
        if self.script is _fail:
            self.end(generation)
        cancel = generation.cancel

        def cancel_and_tell(reason: CancelReason) -> None:
            is_first = not generation.cancelled
            cancel(reason)
            if is_first and self.script is by_hand:
                self.end(generation)

        generation.cancel = cancel_and_tell  # type: ignore[method-assign]
        return generation


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("threshold", [TAKES_ALL, TAKES_NONE])
async def test_a_tenant_pays_for_the_answer_alone(threshold: float, *, is_short: bool) -> None:
    """The small answer is charged after the verdict, whether it has ended by then or not."""
    plan = Plan("p", tokens_per_minute=100_000.0, requests_per_minute=100.0)
    alice = tenant("alice", "key-of-alice", plan=plan)
    prices = {MODEL: Prices(prompt=1e6, completion=2e6), CODE: Prices(prompt=1e7, completion=4e7)}
    observed, config = Observed(), QuotaConfig()
    store = MemoryStore(config, SpendWatch(observed))
    quotas = Quotas(store, SpendWatch(observed), observed, prices.__getitem__)
    small, large = EndingFleet(quotas), ChargingFleet(quotas)
    if not is_short:
        small.script = by_hand
    changes = {"fleet": small, "code_fleet": large, "quotas": quotas}
    async with judged(threshold, tenancy=Tenancy(tenants_of(alice)), **changes) as models:
        headers = {"authorization": "Bearer key-of-alice"}
        async with asking(models, stream=True, headers=headers) as client:
            generation = await small.nth(0)
            if not is_short:
                generation.say("abcd")
                if threshold == TAKES_ALL:
                    generation.finish()
                    small.end(generation)
            await client.until(b"[DONE]")
        assert quotas.num_open == 0
    answering = (small if threshold == TAKES_ALL else large).generations[0]
    tokens = answering.usage.prompt_tokens, answering.usage.completion_tokens
    price = prices[MODEL if threshold == TAKES_ALL else CODE]
    cost = (tokens[0] * price.prompt + tokens[1] * price.completion) / 1e6
    account = store.last_seen("alice", limits_of(plan))
    assert account is not None
    assert (account.spent, account.in_flight) == (cost * NANOS, 0)
    assert account.used_tokens == sum(tokens)
    assert 98.9 < account.requests < 99.1, "it is one request"
    assert [name for name, *_ in observed.auto] == [MODEL if threshold == TAKES_ALL else CODE]


def _break(generation: FakeGeneration) -> None:
    raise Broken


@pytest.mark.parametrize(
    ("small", "large", "status", "tokens"),
    [
        (answer_hello, _fail, 200, 30),
        (answer_hello, overloaded("full", 1.0), 200, 30),
        (answer_hello, _break, 200, 30),
        (overloaded("full", 1.0), answer_hello, 503, 0),
        (_fail, answer_hello, 500, 19),
    ],
)
async def test_nothing_stays_reserved_or_held_whatever_goes_wrong(
    small: Callable[[FakeGeneration], None] | RequestError,
    large: Callable[[FakeGeneration], None] | RequestError,
    status: int,
    tokens: int,
) -> None:
    """The tokens are those that are paid for."""
    plan = Plan("p", tokens_per_minute=100_000.0)
    alice = tenant("alice", "key-of-alice", plan=plan)
    observed, config = Observed(), QuotaConfig()
    store = MemoryStore(config, SpendWatch(observed))
    quotas = Quotas(store, SpendWatch(observed), observed, lambda name: Prices())
    fleets = EndingFleet(quotas), EndingFleet(quotas)
    for fleet, does in zip(fleets, (small, large), strict=True):
        if isinstance(does, RequestError):
            fleet.refuse_with = does
        else:
            fleet.script = does
    changes = {"fleet": fleets[0], "code_fleet": fleets[1], "quotas": quotas}
    async with judged(TAKES_NONE, tenancy=Tenancy(tenants_of(alice)), **changes) as models:
        with capture_logs():
            answer = await ask(models, headers={"authorization": "Bearer key-of-alice"})
        assert answer.status == status
        assert quotas.num_open == 0
        assert not quotas._held
        assert quotas.num_under_way("alice") == 0
    account = store.last_seen("alice", limits_of(plan))
    assert account is not None
    assert (account.used_tokens, account.in_flight) == (tokens, 0)


async def test_a_tenant_without_room_keeps_the_small_answer() -> None:
    plan = Plan("p", budget=1.0)
    alice = tenant("alice", "key-of-alice", plan=plan)
    observed, config = Observed(), QuotaConfig()
    store = MemoryStore(config, SpendWatch(observed))
    prices = Prices(completion=1e6)
    quotas = Quotas(store, SpendWatch(observed), observed, lambda name: prices)
    async with judged(
        TAKES_NONE, fleet=FakeFleet(by_hand), tenancy=Tenancy(tenants_of(alice)), quotas=quotas
    ) as models:
        headers = {"authorization": "Bearer key-of-alice"}
        async with asking(models, stream=True, headers=headers) as client:
            generation = await models.demo.nth(0)
            store._ledger.entry("alice", store._month).spent = 2 * NANOS
            generation.say("abcd")
            generation.finish()
            await client.until(b"[DONE]")
        assert models.counts == (1, 0)
