"""Tests of `model: auto`: the server chooses the smallest model that suits a request, and reports
its choice."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from structlog.testing import capture_logs

from ops.models.model_directory import demo_model_path
from server.main import serve
from server.tenants.accounts import limits_of
from server.tenants.memory_store import MemoryStore, QuotaObserver, SpendWatch
from server.tenants.quotas import Quotas
from server.tenants.tenancy import Tenancy
from tests.server.api.test_many_models import (
    CODE,
    CODE_CONFIG,
    COMPLETIONS,
    DIGEST,
    TURN,
    VECTORS,
    CodeText,
    TwoModels,
)
from tests.server.support.fakes import ChargingFleet, FakeFleet, FakeText, by_hand, fake_model
from tests.server.support.surface import MODEL, request_bytes, surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from transport.control_protocol import ModelState
from triolet.config import (
    AutoConfig,
    ModelLimits,
    QuotaConfig,
    ServedModelConfig,
    ServerConfig,
    TenantsConfig,
    WakePolicy,
)
from triolet.config.members import Members, written_members
from triolet.errors import ConfigError, RequestError, overloaded
from triolet.tenants.plans import Plan, Prices
from triolet.units import NANOS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from server.text.special_tokens import ChatPrompt
    from tests.server.support.surface import Answer

LADDER = AutoConfig(ladder=(MODEL, CODE), completion_tokens=8)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LONG = "x" * 300
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def ladder(auto: AutoConfig = LADDER, **changes: Any) -> AsyncIterator[TwoModels]:  # noqa: ANN401
    """Run a server with a small model, `demo`, and a large one, `code`."""
    demo = changes.pop("fleet", None) or FakeFleet()
    code = changes.pop("code_fleet", None) or FakeFleet()
    demo.status().max_model_len = 256
    config = replace(CODE_CONFIG, **changes.pop("code_config", {}))
    other = fake_model(config, code, text=changes.pop("code_text", None) or CodeText())
    async with surface(demo, others=[other], auto=auto, **changes) as server:
        yield TwoModels(server, demo, code)


async def ask(models: TwoModels, **fields: Any) -> Answer:  # noqa: ANN401
    """Send a chat request with `model: auto`."""
    headers = fields.pop("headers", None)
    body = {"model": "auto", "messages": [TURN]} | fields
    return await models.server.post(CHAT, body, headers=headers)


def asleep(fleet: FakeFleet) -> None:
    fleet.status().workers.clear()
    fleet.status().told, fleet.status().is_coming = ModelState.SLEEPING, True


def awake(fleet: FakeFleet) -> None:
    fleet.status().workers.extend(FakeFleet().status().workers)
    fleet.status().told = None


async def metrics(models: TwoModels, begin: str) -> dict[str, float]:
    """Return the samples of a scrape with this prefix in their names."""
    text = (await models.server.request("GET", "/metrics")).body.decode()
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(begin)]
    return {name: float(value) for name, value in pairs}


@pytest.mark.parametrize(("path", "body"), COMPLETIONS)
async def test_every_way_to_ask_gets_the_smallest_that_fits_by_name(
    path: str, body: dict[str, Any]
) -> None:
    longer = {
        name: LONG if isinstance(value, str) else [{**TURN, "content": LONG}]
        for name, value in body.items()
        if name in ("messages", "prompt", "input")
    }
    async with ladder() as models:
        for changes, counts, shown, version in (
            ({}, (1, 0), MODEL, None),
            (longer, (1, 1), CODE, DIGEST),
            ({}, (2, 1), MODEL, None),
        ):
            answer = await models.server.post(path, body | changes | {"model": "auto"})
            assert answer.status == 200, answer.body
            assert models.counts == counts
            assert f'"model":"{shown}"'.encode() in answer.body
            assert answer.headers.get("x-triolet-model-version") == version
        chosen = await metrics(models, "triolet_auto_requests_total")
    assert chosen == {
        'triolet_auto_requests_total{model="demo",reason="smallest"}': 2.0,
        'triolet_auto_requests_total{model="code",reason="context"}': 1.0,
    }


async def test_prompt_and_completion_are_counted_by_the_tokenizer_of_each() -> None:
    async with ladder() as models:
        models.code.status().max_model_len = 1000
        for max_tokens, counts in ((200, (1, 0)), (250, (1, 1)), (980, (1, 1))):
            answer = await ask(models, max_tokens=max_tokens)
            assert (answer.status == 200) == (max_tokens < 900)
            assert models.counts == counts
        assert answer.error["code"] == "context_length_exceeded"
        # The large model's prompt has twice as many tokens.
        prompt_tokens = len(models.code.generations[0].request.prompt_ids)
        assert f"the request has {prompt_tokens} in the prompt and 980" in answer.error["message"]


async def test_a_text_too_long_for_any_number_of_tokens_of_a_model_goes_to_a_larger_one() -> None:
    async with ladder() as models:
        text = models.server.services.models.named(MODEL).text

        async def refuse(*args: object, **fields: object) -> tuple[int, ...]:
            raise RequestError("cannot fit", status=400, code="context_length_exceeded")

        text.encode = refuse  # type: ignore[method-assign]
        assert (await ask(models)).json["model"] == CODE
        refused = await ask(models, max_tokens=4095)
        assert "is 4096 tokens, of code" in refused.error["message"], (
            "the error must name the model that counted"
        )
        assert "x-triolet-model-version" not in refused.headers
        models.server.services.models.named(CODE).text.encode = refuse  # type: ignore[method-assign]
        assert (await ask(models)).error["message"] == "cannot fit"


async def test_a_model_is_tried_once_though_its_context_shrinks_meanwhile() -> None:
    """The context is that of the connected workers; a smaller one may connect during rendering."""
    async with ladder() as models:
        tries = 0

        async def refuse(*args: object, **fields: object) -> tuple[int, ...]:
            nonlocal tries
            tries += 1
            assert tries == 1
            models.demo.status().max_model_len = 128
            raise RequestError("cannot fit", status=400, code="context_length_exceeded")

        models.server.services.models.named(MODEL).text.encode = refuse  # type: ignore[method-assign]
        assert (await ask(models)).json["model"] == CODE


async def test_a_context_that_an_ollama_client_asks_for_is_part_of_the_choice() -> None:
    async with ladder() as models:
        for num_ctx, shown in ((256, MODEL), (257, CODE), (4096, CODE), (4097, CODE)):
            options = {"num_ctx": num_ctx}
            body = {"model": "auto:latest", "messages": [TURN], "stream": False}
            answer = await models.server.post("/api/chat", body | {"options": options})
            assert answer.json.get("model") == shown


async def test_a_context_that_no_model_with_tools_has_is_cut_to_what_one_has() -> None:
    auto = replace(LADDER, limits=(ModelLimits(CODE, tools=False),))
    async with ladder(auto) as models:
        body = {"model": "auto", "messages": [TURN], "stream": False, "tools": [TOOL]}
        answer = await models.server.post("/api/chat", body | {"options": {"num_ctx": 4096}})
    assert answer.json.get("model") == MODEL


async def test_a_completion_that_is_not_bounded_keeps_to_the_declared_context() -> None:
    auto = replace(LADDER, limits=(ModelLimits(MODEL, context_tokens=64),))
    async with ladder(auto) as models:
        await ask(models)
        (generation,) = models.demo.generations
        request = generation.request
        assert len(request.prompt_ids) + request.sampling.max_tokens == 64
        assert (await ask(models, max_tokens=64)).json["model"] == CODE


async def test_tools_and_forms_go_to_models_that_are_declared_to_take_them() -> None:
    limits = (
        ModelLimits(MODEL, tools=False),
        ModelLimits(CODE, structured_output=False),
    )
    async with ladder(replace(LADDER, limits=limits)) as models:
        form: dict[str, Any] = {"response_format": {"type": "json_object"}}
        tools: dict[str, Any] = {"tools": [TOOL]}
        for fields, shown in (
            (tools, CODE),
            (tools | {"tool_choice": "none"}, MODEL),
            (form, MODEL),
            ({"guided_choice": ["a", "b"]}, MODEL),
        ):
            assert (await ask(models, **fields)).json["model"] == shown, fields
        refused = await ask(models, **tools, **form)
        assert (refused.status, refused.error["param"]) == (400, "tools")
        assert "(demo, code) supports tools and" in refused.error["message"]
        asleep(models.demo)
        assert (await ask(models, **form)).json["model"] == MODEL, "no other model supports it"


async def test_a_model_that_sleeps_is_woken_only_if_no_other_fits_or_by_policy() -> None:
    for wake, shown in ((WakePolicy.IF_NEEDED, CODE), (WakePolicy.ALWAYS, MODEL)):
        async with ladder(replace(LADDER, wake=wake)) as models:
            asleep(models.demo)
            assert (await ask(models)).json["model"] == shown
            awake(models.demo)
            assert (await ask(models)).json["model"] == MODEL
            asleep(models.code)
            assert (await ask(models, max_tokens=250)).json["model"] == CODE


async def test_a_model_that_cannot_be_woken_is_passed_over_whatever_the_policy() -> None:
    async with ladder(replace(LADDER, wake=WakePolicy.ALWAYS)) as models:
        asleep(models.demo)
        models.demo.status().is_coming = False
        assert (await ask(models)).json["model"] == CODE


class CountingText(FakeText):
    """Counts the prompts that are tokenized."""

    num_prompts = 0

    async def render_chat(self, *args: Any, **more: Any) -> ChatPrompt:  # noqa: ANN401
        self.num_prompts += 1
        return await super().render_chat(*args, **more)


async def test_a_prompt_is_tokenised_only_if_a_model_that_may_answer_has_room() -> None:
    text, other = CountingText(), CountingText()
    async with ladder(text=text, code_text=other) as models:
        models.demo.admission.refuse_with = overloaded("demo is full", 7.0)
        assert (await ask(models, max_tokens=250)).json["model"] == CODE
        assert (text.num_prompts, other.num_prompts) == (1, 1), "the larger model has room"
        models.code.admission.refuse_with = overloaded("code is full", 9.0)
        refused = await ask(models)
        assert (refused.status, b"demo is full" in refused.body) == (503, True)
        assert (await ask(models, n=1000)).status == 400, "an invalid request is not tried again"
        assert (text.num_prompts, other.num_prompts) == (1, 1)
        assert (len(models.demo.admission.keys), len(models.code.admission.keys)) == (1, 1)
        models.demo.admission.refuse_with = None
        tried = await ask(models, max_tokens=250)
        assert (tried.status, b"code is full" in tried.body) == (503, True)
        assert tried.headers["x-triolet-model-version"] == DIGEST, "the model that refuses"
        assert (text.num_prompts, other.num_prompts) == (2, 1), "counted only where necessary"


async def test_a_model_that_cannot_be_woken_keeps_no_request_from_an_early_refusal() -> None:
    text = CountingText()
    async with ladder(text=text) as models:
        models.demo.admission.refuse_with = overloaded("demo is full", 7.0)
        asleep(models.code)
        models.code.status().is_coming = False
        assert (await ask(models)).status == 503
        assert text.num_prompts == 0
        models.code.status().is_coming = True
        assert (await ask(models)).json["model"] == MODEL, "a longer prompt would wake the other"
        assert text.num_prompts == 1


async def test_an_answer_with_a_key_stays_on_the_model_that_it_was_begun_on() -> None:
    async with ladder() as models:
        asleep(models.demo)
        headers = {"idempotency-key": "one"}
        first = await ask(models, headers=headers)
        awake(models.demo)
        again = await ask(models, headers=headers)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.json == first.json
        assert [one.headers["x-triolet-model-version"] for one in (first, again)] == [DIGEST] * 2
        assert models.counts == (0, 1)
        assert (await ask(models)).json["model"] == MODEL, "without the key it is a new request"
        chosen = await metrics(models, "triolet_auto_requests_total")
    assert chosen['triolet_auto_requests_total{model="code",reason="kept"}'] == 1.0


async def test_a_retry_of_what_failed_stays_on_its_model_too() -> None:
    async with ladder(
        code_fleet=FakeFleet(lambda one: one.fail(overloaded("sick", 1.0)))
    ) as models:
        asleep(models.demo)
        headers = {"idempotency-key": "one"}
        assert (await ask(models, headers=headers)).status == 503
        awake(models.demo)
        assert (await ask(models, headers=headers)).status == 503
        assert models.counts == (0, 2)


async def test_a_stream_that_was_cut_goes_on_from_the_model_that_it_was_begun_on() -> None:
    async with ladder(code_fleet=FakeFleet(by_hand)) as models:
        asleep(models.demo)
        body = {"model": "auto", "messages": [TURN], "stream": True}
        headers = {"idempotency-key": "one"}
        client = await models.server.connect()
        async with client.stream:
            await client.send(_post(body, headers))
            generation = await models.code.nth(0)
            generation.say("Hello")
            await client.until(b"Hello")
        awake(models.demo)
        generation.say(" again")
        generation.finish()
        rest = await models.server.post(CHAT, body, headers=headers | {"last-event-id": "1"})
        assert rest.headers["x-triolet-model-version"] == DIGEST
        assert b" again" in rest.body
        assert b"Hello" not in rest.body
        assert models.counts == (0, 1)


def _post(body: object, headers: dict[str, str]) -> bytes:
    return request_bytes("POST", CHAT, body=json.dumps(body).encode(), headers=headers)


async def test_a_tenant_has_a_ladder_of_its_own_and_what_it_saves_is_counted() -> None:
    plan = Plan("p", requests_per_minute=100.0)
    bob = replace(tenant("bob", "key-of-bob", plan=plan), auto=(CODE,))
    alice = tenant("alice", "key-of-alice", plan=plan)
    prices = {MODEL: Prices(prompt=1e6, completion=2e6), CODE: Prices(prompt=1e7, completion=4e7)}
    observed = Observed()
    config, watch = QuotaConfig(), SpendWatch(observed)
    store = MemoryStore(config, watch)
    quotas = Quotas(store, watch, observed, prices.__getitem__)
    fleets = {"fleet": ChargingFleet(quotas), "code_fleet": ChargingFleet(quotas)}
    tenancy = Tenancy(tenants_of(alice, bob))
    async with ladder(**fleets, tenancy=tenancy, quotas=quotas) as models:
        for name, shown in (("alice", MODEL), ("bob", CODE)):
            headers = {"authorization": f"Bearer key-of-{name}"}
            answer = await ask(models, headers=headers)
            assert answer.json["model"] == shown
            listed = await models.server.request("GET", "/v1/models/auto", headers=headers)
            assert listed.json["ladder"] == ([MODEL, CODE] if name == "alice" else [CODE])
    usage = len(models.demo.generations[0].request.prompt_ids), len("Hello there")
    spent = [store.last_seen(name, limits_of(plan)) for name in ("alice", "bob")]
    charged = [usage[0] + 2 * usage[1], 2 * 10 * usage[0] + 40 * usage[1]]
    assert [one.spent for one in spent if one] == [amount * NANOS for amount in charged]
    assert observed.auto == [
        (MODEL, charged[0], 10 * usage[0] + 40 * usage[1]),
        (CODE, charged[1], charged[1]),
    ]


async def test_a_tenant_that_gets_short_answers_needs_little_room_for_them() -> None:
    alice = tenant("alice", "key-of-alice", plan=Plan("p", max_output_tokens=2))
    async with ladder(
        replace(LADDER, completion_tokens=255), tenancy=Tenancy(tenants_of(alice))
    ) as models:
        headers = {"authorization": "Bearer key-of-alice"}
        assert (await ask(models, headers=headers)).json["model"] == MODEL
        assert models.demo.generations[0].request.sampling.max_tokens == 2


class Observed(QuotaObserver):
    """Records the reported costs."""

    def __init__(self) -> None:
        self.auto: list[tuple[str, float, float]] = []

    def auto_cost(self, model: str, amount: float, on_largest: float) -> None:
        self.auto.append((model, amount, on_largest))


async def test_what_is_counted_is_counted_on_the_model_that_would_answer() -> None:
    async with ladder() as models:
        for path, body in (
            ("/v1/messages/count_tokens", {"messages": [TURN]}),
            ("/v1/responses/input_tokens", {"input": "Hi"}),
        ):
            count = {
                name: (await models.server.post(path, body | {"model": name})).json
                for name in ("auto", MODEL, CODE)
            }
            assert count["auto"] == count[MODEL] != count[CODE]


@pytest.mark.parametrize(("path", "body"), [*VECTORS, ("/tokenize", {"prompt": "Hi"})])
async def test_what_is_no_completion_names_its_model(path: str, body: dict[str, Any]) -> None:
    async with ladder() as models:
        answer = await models.server.post(path, body | {"model": "auto"})
        assert answer.status == 400
        assert b"chooses a model for completions only" in answer.body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, 6]}, "prompt"),
        ({"prompt": "Hi", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": "Hi", "stop_token_ids": [5]}, "stop_token_ids"),
    ],
)
async def test_ids_of_tokens_name_their_model(fields: dict[str, Any], param: str) -> None:
    async with ladder() as models:
        answer = await models.server.post("/v1/completions", fields | {"model": "auto"})
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "name a model" in answer.error["message"]
        assert models.counts == (0, 0)


async def test_it_is_listed_where_it_is_on() -> None:
    async with ladder() as models:
        asleep(models.demo)
        listed = (await models.server.request("GET", "/v1/models")).json
        assert [card["id"] for card in listed["data"]] == [MODEL, CODE, "coder", "auto"]
        auto = listed["data"][-1]
        assert (auto["root"], auto["state"], auto["digest"]) == ("auto", "serving", None)
        assert (auto["ladder"], auto["max_model_len"]) == ([MODEL, CODE], 4096)
        assert (await models.server.request("GET", "/v1/models/auto")).json == auto
        document = (await models.server.request("GET", "/openapi.json")).json
        fields = document["components"]["schemas"]["ChatRequest"]["properties"]
        names = [one["enum"] for one in fields["model"]["anyOf"] if "enum" in one]
        assert names == [[MODEL, CODE, "coder", "auto"]]
        loaded = await models.server.post("/api/chat", {"model": "auto", "stream": False})
        assert loaded.json["model"] == "auto"


async def test_it_is_off_by_default_and_says_how_it_is_turned_on() -> None:
    async with ladder(AutoConfig()) as models:
        answer = await ask(models)
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert answer.error["message"].endswith("turn it on with [auto] ladder in triolet.toml")
        assert (await models.server.request("GET", "/v1/models/auto")).status == 404
        listed = (await models.server.request("GET", "/v1/models")).json["data"]
        assert "auto" not in [card["id"] for card in listed]


async def test_a_socket_may_leave_the_model_open() -> None:
    async with ladder() as models:
        socket = await open_socket(models.server)
        async with socket.client.stream:
            for text, shown in (("hi", MODEL), (LONG, CODE)):
                events = await socket.answer(
                    {"type": "response.create", "model": "auto", "input": text}
                )
                assert events[-1]["response"]["model"] == shown


async def test_a_server_does_not_start_with_ladders_of_models_that_it_has_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(f'cache_secret = "{"0" * 64}"\n[tenants.a]\nauto = ["{CODE}"]\n')
    file.chmod(0o600)
    tenants = TenantsConfig(str(file))
    model = {"model_dir": str(demo_model_path()), "port": 0, "model_name": MODEL}
    for changes, words in (
        (
            {"auto": AutoConfig((CODE,))},
            r"\[auto\] ladder names 'code', which is not a model of this",
        ),
        ({"auto": AutoConfig((MODEL,)), "model_aliases": ("auto",)}, "is called 'auto' too"),
        ({"auto": AutoConfig((MODEL,)), "tenants": tenants}, r"\[tenants.a\] auto names 'code'"),
        ({"tenants": tenants}, "`model: auto` is off; turn it on with"),
    ):
        with pytest.raises(ConfigError, match=words):
            await serve(ServerConfig(**model, **changes))  # type: ignore[arg-type]


async def test_a_server_starts_without_the_ladder_of_a_model_that_it_cannot_read(
    tmp_path: Path,
) -> None:
    demo = ServedModelConfig(MODEL, str(demo_model_path()))
    members = tmp_path / "members.json"
    broken = ServedModelConfig(CODE, str(tmp_path))
    members.write_bytes(written_members(Members((), (demo, broken))))
    members.chmod(0o600)
    file = tmp_path / "tenants.toml"
    text = f'cache_secret = "{"0" * 64}"\n[tenants.a]\nauto = ["{CODE}"]\n[tenants.b]\n'
    file.write_text(text)
    file.chmod(0o600)
    config = ServerConfig(
        model_dir=demo.model_dir,
        models=(demo,),
        port=0,
        auto=AutoConfig((MODEL,)),
        tenants=TenantsConfig(str(file)),
        members_file=str(members),
    )
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, config)
            nursery.cancel_scope.cancel()
    [refused] = [line for line in lines if line["event"] == "tenants_refused"]
    assert f"[tenants.a] auto names '{CODE}'" in refused["reason"]
    file.write_text(text.replace(CODE, "never-there"))
    with pytest.raises(ConfigError, match="auto names 'never-there'"):
        await serve(config)


async def test_a_process_that_ends_takes_nothing() -> None:
    async with ladder() as models:
        models.server.services.state.drain()
        assert (await ask(models)).status == 503
