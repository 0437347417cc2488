"""Tests of a server with several models: each request is answered by the model that it names."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from server.api.served_models import ModelTable
from server.contract.request_events import FirstTokenArrived
from server.tenants.accounts import limits_of
from server.tenants.memory_store import MemoryStore, QuotaObserver, SpendWatch
from server.tenants.quotas import Quotas
from server.tenants.tenancy import Tenancy
from server.text.model_files import EmbeddingModel
from tests.server.support.fakes import ChargingFleet, FakeFleet, FakeText, fake_model
from tests.server.support.request_lives import FACTS
from tests.server.support.surface import CONFIG, MODEL, posted, surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from transport.control_protocol import ModelState
from triolet.config import ANY_MODEL, QuotaConfig, ResponseCacheConfig
from triolet.errors import ConfigError
from triolet.tenants.plans import Plan, Prices
from triolet.units import MIB, NANOS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.api.served_models import ServedModel
    from tests.server.support.surface import Surface

CODE = "code"
DIGEST = "sha256:" + "0123456789abcdef" * 4
CODE_CONFIG = replace(
    CONFIG, model_name=CODE, model_aliases=("coder",), model_digest=DIGEST, model_dir="/code"
)
TURN = {"role": "user", "content": "Hi"}
COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [TURN]}),
    ("/v1/chat/completions", {"messages": [TURN], "stream": True}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": [TURN], "max_tokens": 5}),
    ("/api/chat", {"messages": [TURN], "stream": False}),
    ("/api/generate", {"prompt": "Hi", "stream": False}),
    ("/api/generate", {"prompt": "Hi", "stream": False, "raw": True}),
]
VECTORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}),
    ("/v1/score", {"text_1": "Hi", "text_2": "Ho"}),
    ("/api/embed", {"input": "Hi"}),
    ("/api/embeddings", {"prompt": "Hi"}),
]


class CodeText(FakeText):
    """Writes every text twice, so that its prompts can be distinguished."""

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        ids = await super().encode(text, param=param)
        return (ids * 2)[:max_tokens]


@dataclass
class TwoModels:
    """A server with the models `demo` and `code`."""

    server: Surface
    demo: FakeFleet
    code: FakeFleet

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of requests to each so far."""
        fleets = self.demo, self.code
        first, second = (len(fleet.generations) + len(fleet.inputs) for fleet in fleets)
        return first, second


@asynccontextmanager
async def two_models(**changes: Any) -> AsyncIterator[TwoModels]:  # noqa: ANN401 - of `surface`
    demo = changes.pop("fleet", None) or FakeFleet()
    code = changes.pop("code_fleet", None) or FakeFleet()
    config = replace(CODE_CONFIG, **changes.pop("code_config", {}))
    other = fake_model(config, code, text=CodeText())
    async with surface(demo, others=[other], **changes) as server:
        yield TwoModels(server, demo, code)


def model_of(models: TwoModels, name: str) -> ServedModel:
    return models.server.services.models.named(name)


@pytest.mark.parametrize(("path", "body"), COMPLETIONS)
async def test_a_completion_is_of_the_model_that_it_names(path: str, body: dict[str, Any]) -> None:
    async with two_models() as models:
        for name, counts, shown in (
            (MODEL, (1, 0), MODEL),
            (CODE, (1, 1), CODE),
            ("coder", (1, 2), CODE),
        ):
            answer = await models.server.post(path, body | {"model": name})
            assert answer.status == 200, answer.body
            assert models.counts == counts
            assert f'"model":"{shown}"'.encode() in answer.body
            version = answer.headers.get("x-triolet-model-version")
            assert version == (DIGEST if shown == CODE else None)
        prompts = [fleet.generations[0].request.prompt_ids for fleet in (models.demo, models.code)]
        assert prompts[1] == prompts[0] * 2, "each with its own tokenizer"


@pytest.mark.parametrize(("path", "body"), VECTORS)
async def test_vectors_are_of_the_model_that_is_named(path: str, body: dict[str, Any]) -> None:
    async with two_models() as models:
        answer = await models.server.post(path, body | {"model": CODE})
        assert answer.status == 200, answer.body
        assert models.counts[0] == 0 < models.counts[1]
        object.__setattr__(model_of(models, CODE), "embedding", EmbeddingModel(objection="none"))
        assert (await models.server.post(path, body | {"model": CODE})).status == 400
        assert (await models.server.post(path, body | {"model": MODEL})).status == 200


@pytest.mark.parametrize(("path", "body"), COMPLETIONS[:4])
async def test_a_request_without_a_name_is_for_the_first(path: str, body: dict[str, Any]) -> None:
    async with two_models() as models:
        assert (await models.server.post(path, body)).status == 200
        assert models.counts == (1, 0)


async def test_texts_are_counted_by_the_tokenizer_of_the_model() -> None:
    async with two_models() as models:
        counts = []
        for name in (MODEL, CODE):
            answer = await models.server.post("/tokenize", {"prompt": "abc", "model": name})
            counts.append(answer.json["count"])
            for path, body in (
                ("/v1/messages/count_tokens", {"messages": [TURN]}),
                ("/v1/responses/input_tokens", {"input": "Hi"}),
            ):
                counts.append((await models.server.post(path, body | {"model": name})).json)
    assert counts[3] == 2 * counts[0] == 6
    assert counts[4]["input_tokens"] == 2 * counts[1]["input_tokens"]
    assert counts[5]["input_tokens"] == 2 * counts[2]["input_tokens"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cod", "there are demo, code, coder; did you mean code?"),
        ("zzz", "there is no model 'zzz'; there are demo, code, coder"),
    ],
)
async def test_an_unknown_name_is_told_which_there_are(name: str, hint: str) -> None:
    async with two_models() as models:
        answer = await models.server.post(*_with_model(COMPLETIONS[0], name))
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert answer.error["param"] == "model"
        assert answer.error["message"].endswith(hint)
        assert (await models.server.request("GET", f"/v1/models/{name}")).status == 404
        assert models.counts == (0, 0)


def _with_model(request: tuple[str, dict[str, Any]], name: str) -> tuple[str, dict[str, Any]]:
    path, body = request
    return path, body | {"model": name}


async def test_a_long_list_of_names_is_cut_in_an_error() -> None:
    others = [
        fake_model(replace(CONFIG, model_name=f"model-{number}"), FakeFleet())
        for number in range(40)
    ]
    answer = await posted(*_with_model(COMPLETIONS[0], "model-x"), others=others)
    message = answer.error["message"]
    assert "model-14 and 25 more, which GET /v1/models lists" in message
    assert "model-15" not in message


async def test_one_model_may_answer_to_every_other_name() -> None:
    async with two_models(code_config={"model_aliases": (ANY_MODEL,)}) as models:
        for name in ("gpt-4o", CODE, MODEL):
            await models.server.post(*_with_model(COMPLETIONS[0], name))
        assert models.counts == (1, 2)
        answer = await models.server.post("/api/chat", {"model": "demo:latest", "stream": False})
        assert answer.json["model"] == MODEL


def test_two_models_cannot_have_one_name() -> None:
    first = fake_model(replace(CONFIG, model_aliases=(CODE,), model_dir="/demo"), FakeFleet())
    second = fake_model(CODE_CONFIG, FakeFleet())
    with pytest.raises(ConfigError, match="two models are called 'code': /demo and /code"):
        ModelTable([first, second])


async def test_all_models_are_listed_with_version_and_state() -> None:
    async with two_models() as models:
        models.code.status().workers.clear()
        listed = (await models.server.request("GET", "/v1/models")).json
        cards = {card["id"]: (card["digest"], card["state"]) for card in listed["data"]}
        assert cards == {
            MODEL: (None, "serving"),
            CODE: (DIGEST, "staged"),
            "coder": (DIGEST, "staged"),
        }
        assert (listed["first_id"], listed["last_id"]) == (MODEL, "coder")
        shown = await models.server.request("GET", "/v1/models/coder")
        assert (shown.json["digest"], shown.json["id"]) == (DIGEST, "coder")
        tags = (await models.server.request("GET", "/api/tags")).json["models"]
        assert [tag["name"] for tag in tags] == ["demo:latest", "code:latest", "coder:latest"]
        assert tags[1]["digest"] == DIGEST.removeprefix("sha256:")
        running = (await models.server.request("GET", "/api/ps")).json["models"]
        assert [tag["name"] for tag in running] == ["demo:latest"]
        details = await models.server.post("/api/show", {"model": "code"})
        assert details.json["modelfile"] == "FROM code:latest"


async def test_a_server_is_ready_while_one_of_its_models_is() -> None:
    async with two_models() as models:
        models.code.status().workers.clear()
        answer = await models.server.request("GET", "/health/ready")
        assert answer.status == 200
        assert answer.json["models"] == [
            {"name": MODEL, "state": "serving"},
            {"name": CODE, "state": "staged"},
        ]
        models.demo.status().workers[1].state = "dead"
        answer = await models.server.request("GET", "/health/ready")
    assert (answer.status, answer.error["code"]) == (503, "no_worker")
    assert "demo: no live worker for decode; code: no live worker" in answer.error["message"]


async def test_a_server_is_ready_while_all_its_models_sleep_and_while_one_is_woken() -> None:
    async with two_models() as models:
        demo, code = models.demo.status(), models.code.status()
        for status in (demo, code):
            status.workers.clear()
            status.told, status.is_coming = ModelState.SLEEPING, True
        for told, is_coming, code_status in (
            (ModelState.LOADING, True, 503),  # loading with the fleet: never ready before
            (ModelState.STAGED, True, 200),
            (ModelState.SLEEPING, False, 200),
            (ModelState.LOADING, True, 200),  # loading for a request, which waits
        ):
            code.told, code.is_coming = told, is_coming
            answer = await models.server.request("GET", "/health/ready")
            assert answer.status == code_status
        demo.is_coming = code.is_coming = False
        assert (await models.server.request("GET", "/health/ready")).status == 503
        listed = (await models.server.request("GET", "/v1/models")).json["data"]
    assert [model["state"] for model in listed[:2]] == ["sleeping", "loading"]


async def test_load_status_and_metrics_are_of_all_models() -> None:
    async with two_models() as models:
        models.demo.status().queued, models.code.status().queued = 1, 2
        load = (await models.server.request("GET", "/load")).json
        assert load == {"server_load": 3, "queued": 3, "running": 0}
        services = models.server.services
        for name, count in ((MODEL, 1), (CODE, 2)):
            for _ in range(count):
                services.metrics.fleets[name].first_token(FirstTokenArrived(FACTS, 0.01))
        status = (await models.server.request("GET", "/fleet/status")).json
        assert status["queued"] == 3
        assert [(m["name"], m["queued"]) for m in status["models"]] == [(MODEL, 1), (CODE, 2)]
        assert [worker["model"] for worker in status["workers"]] == [MODEL, MODEL, CODE, CODE]
        assert status["latencies"]["ttft"]["totals"][-1] == 3
        text = (await models.server.request("GET", "/metrics")).body.decode()
    assert 'triolet_requests_queued{model="demo"} 1.0' in text
    assert 'triolet_requests_queued{model="code"} 2.0' in text
    assert 'triolet_time_to_first_token_seconds_count{model="code"} 2.0' in text
    assert 'vllm:num_requests_waiting{engine="0",model_name="code"} 2.0' in text
    heads = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)), "each metric family must occur once"


async def test_an_audit_adds_up_the_queues_of_all_models() -> None:
    async with two_models() as models:
        for fleet, count in ((models.demo, 3), (models.code, 4)):
            fleet.accounts = structs.replace(
                fleet.accounts, received=count, accepted=count - 1, in_flight=count - 3, waiting=0
            )
        models.code.accounts = structs.replace(models.code.accounts, waiting=1)
        audit = (await models.server.request("GET", "/fleet/audit")).json
    server = audit["server"]
    assert (server["received"], server["accepted"], server["in_flight"]) == (7, 5, 1)
    assert (server["rejected"], server["ended"]) == ({"overloaded": 2}, {"stop": 4})
    assert (server["name"], server["connections"]) == ("server", 1)
    assert audit["violations"] == []


async def test_kept_answers_of_one_model_are_not_given_for_another() -> None:
    cache = ResponseCacheConfig(max_bytes=MIB)
    body = {"prompt": [5, 6], "temperature": 0, "response_cache": "allow"}
    async with two_models(response_cache=cache, code_config={"response_cache": cache}) as models:
        outcomes = []
        for name in (MODEL, CODE, MODEL, CODE):
            answer = await models.server.post("/v1/completions", body | {"model": name})
            outcomes.append(answer.headers["x-triolet-cache"])
    assert outcomes == ["miss", "miss", "hit", "hit"]


async def test_a_tenant_s_limits_count_over_all_models_and_each_has_its_prices() -> None:
    plan = Plan("p", requests_per_minute=3.0)
    tenancy = Tenancy(tenants_of(tenant("alice", "key-of-alice", plan=plan)))
    config, watch = QuotaConfig(), SpendWatch(QuotaObserver())
    prices = {MODEL: Prices(prompt=1e6), CODE: Prices(prompt=1e9)}
    store = MemoryStore(config, watch)
    quotas = Quotas(store, watch, QuotaObserver(), prices.__getitem__)
    fleets = {"fleet": ChargingFleet(quotas), "code_fleet": ChargingFleet(quotas)}
    async with two_models(**fleets, tenancy=tenancy, quotas=quotas) as models:
        for name, expected in ((MODEL, 200), (CODE, 200), (CODE, 200), (MODEL, 429)):
            answer = await models.server.post(
                "/v1/completions",
                {"model": name, "prompt": [5]},
                headers={"authorization": "Bearer key-of-alice"},
            )
            assert answer.status == expected, answer.body
        account = store.last_seen("alice", limits_of(plan))
    assert account is not None
    assert account.spent == (1 + 1000 + 1000) * NANOS


async def test_one_socket_asks_several_models() -> None:
    async with two_models() as models:
        async with await open_socket(models.server) as socket:
            for name in (CODE, MODEL):
                events = await socket.answer(
                    {"type": "response.create", "model": name, "input": "hi"}
                )
                assert events[-1]["response"]["model"] == name
        assert models.counts == (1, 1)


async def test_an_answer_that_is_kept_comes_from_its_model() -> None:
    async with two_models() as models:
        for name, counts in ((CODE, (0, 1)), (CODE, (0, 1))):
            path, body = _with_model(COMPLETIONS[0], name)
            answer = await models.server.post(path, body, headers={"idempotency-key": "one"})
            assert (answer.status, answer.json["model"]) == (200, CODE)
            assert models.counts == counts
        path, body = _with_model(COMPLETIONS[0], MODEL)
        answer = await models.server.post(path, body, headers={"idempotency-key": "one"})
        assert answer.status == 409, "the same key for another model is another request"


async def test_an_answer_that_is_kept_is_given_while_its_model_leaves_and_not_for_the_next() -> (
    None
):
    async with two_models() as models:
        services, [path, body] = models.server.services, COMPLETIONS[0]
        key = {"idempotency-key": "one"}
        first = await models.server.post(path, body, headers=key)
        services.models.change({}, without=(MODEL,))
        again = await models.server.post(path, body, headers=key)
        assert (again.status, again.json["model"], models.counts) == (200, MODEL, (1, 0))
        assert again.body == first.body
        assert "x-triolet-model-version" not in again.headers
        services.kept.forget_model(MODEL)
        anew = await models.server.post(path, body, headers=key)
        assert (anew.status, anew.json["model"], models.counts) == (200, CODE, (1, 1))


async def test_the_api_document_names_all_models() -> None:
    async with two_models() as models:
        models.code.status().max_model_len = 9000
        document = (await models.server.request("GET", "/openapi.json")).json
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    names = [one["enum"] for one in fields["model"]["anyOf"] if "enum" in one]
    assert names == [[MODEL, CODE, "coder"]]
    most = [one["maximum"] for one in fields["max_tokens"]["anyOf"] if "maximum" in one]
    assert most == [models.code.max_model_len - 1]
