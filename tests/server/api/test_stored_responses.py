"""Tests of stored responses over HTTP: continuing them, which tenant can read them, and when they
expire."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from server.api.openai.responses_events import ResponseEvents, message_frame, response_head
from server.api.openai.responses_schema import InputItem, ResponseRequest
from server.api.openai.stored_responses import remember
from server.api.schemas import read_request
from server.cache.store import ENTRY_BYTES, ResponseStore
from server.contract.generation import FinishReason, GenerationRequest
from server.tenants.tenancy import Tenancy
from tests.server.support.clock import pass_time
from tests.server.support.fakes import FakeFleet, FakeGeneration, by_hand
from tests.server.support.surface import MODEL, posted, request_bytes, requested, surface
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from triolet.config import OF_CONNECTION, StoredResponsesConfig
from triolet.errors import no_worker
from triolet.fair_lru import ANYBODY, Keeper
from triolet.sampling import SamplingParams
from triolet.units import MIB

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.server.support.surface import Answer, Surface

PATH = "/v1/responses"
KEPT = StoredResponsesConfig(ttl_s=3600)
HOW = "start it with --responses-ttl 3600"
GONE = "stored in memory for 3600 s after its last use"
TOOLS = [{"type": "function", "name": "weather"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


def ask(**more: object) -> dict[str, Any]:
    return {"model": MODEL, "input": "one", **more}


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "warm"}


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


async def created(server: Surface, **more: object) -> dict[str, Any]:
    """Return a new response."""
    answer = await server.post(PATH, ask(**more))
    assert answer.status == 200, answer.body
    if more.get("stream"):
        response: dict[str, Any] = answer.named_events[-1][1]["response"]
        return response
    return dict(answer.json)


async def get(server: Surface, path: str, key: str = "") -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else None
    return await server.request("GET", f"{PATH}/{path}", headers=headers)


def prompt(server: Surface, index: int = -1) -> str:
    return bytes(server.fleet.generations[index].request.prompt_ids).decode()


def calls_first(generation: FakeGeneration) -> None:
    """Call a tool until its result is in the conversation."""
    has_result = b"tool of" in bytes(generation.request.prompt_ids)
    generation.say("It is warm." if has_result else CALL)
    generation.finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_shown_continued_and_deleted_by_its_id(stream: bool) -> None:
    async with surface(responses=KEPT) as server:
        first = await created(server, instructions="only once", stream=stream)
        shown = await get(server, first["id"])
        second = await created(server, input="two", previous_response_id=first["id"], stream=stream)
        third = await created(server, input="three", previous_response_id=second["id"])
        deleted = await server.request("DELETE", f"{PATH}/{first['id']}")
        again = await server.request("DELETE", f"{PATH}/{first['id']}")
        broken = await server.post(PATH, ask(previous_response_id=third["id"]))
    assert first["store"] is True
    assert shown.json == first
    assert second["previous_response_id"] == first["id"]
    assert prompt(server, 1) == "user: one\nassistant: Hello there\nuser: two\nassistant:"
    assert prompt(server, 2) == (
        "user: one\nassistant: Hello there\nuser: two\nassistant: Hello there\n"
        "user: three\nassistant:"
    )
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    assert again.status == 404
    # The error names the missing response of the chain.
    assert (broken.status, broken.error["code"]) == (400, "previous_response_not_found")
    assert first["id"] in broken.error["message"]


@pytest.mark.parametrize("store", [None, True, False])
async def test_a_response_is_stored_unless_its_client_says_no(store: bool | None) -> None:
    async with surface(responses=KEPT) as server:
        response = await created(server, store=store)
        shown = await get(server, response["id"])
    is_stored = store is not False
    assert response["store"] is is_stored
    assert shown.status == (200 if is_stored else 404)


@pytest.mark.parametrize("store", [None, False])
async def test_an_answer_that_is_not_stored_holds_nothing_of_its_request(
    store: bool | None,
) -> None:
    config = StoredResponsesConfig() if store is None else KEPT
    async with (
        surface(FakeFleet(by_hand), responses=config) as server,
        await server.connect() as client,
    ):
        body = json.dumps(ask(stream=True, store=store, input="a question of its own"))
        await client.send(request_bytes("POST", PATH, body=body.encode()))
        generation = await server.fleet.nth(0)
        generation.say("so far")
        await client.until(b"so far")
        gc.collect()
        held = [one for one in gc.get_objects() if isinstance(one, InputItem)]
        assert not [item for item in held if item.content == "a question of its own"]
        generation.finish()
        await client.until(b"response.completed")


async def test_without_the_option_every_error_says_how_to_switch_it_on() -> None:
    async with surface() as server:
        response = await created(server)
        (item,) = response["output"]
        assert response["store"] is False
        for asked, status, param in (
            (ask(previous_response_id=response["id"]), 400, "previous_response_id"),
            (ask(store=True), 400, "store"),
            (ask(input=[reference(item)]), 404, "input.0.id"),
        ):
            for path in (PATH, f"{PATH}/input_tokens"):
                refused = await server.post(path, asked)
                assert (refused.status, refused.error["param"]) == (status, param)
                assert HOW in refused.error["message"]
        for path in (response["id"], f"{response['id']}/input_items"):
            missing = await get(server, path)
            assert missing.status == 404
            assert HOW in missing.error["message"]
        deleted = await server.request("DELETE", f"{PATH}/{response['id']}")
        assert (deleted.status, HOW in deleted.error["message"]) == (404, True)
        conversation = await server.post(PATH, ask(conversation="conv_1"))
    assert "previous_response_id" in conversation.error["message"]
    assert not len(server.services.responses)


async def test_items_are_referred_to_by_their_ids() -> None:
    fleet = FakeFleet(calls_first)
    async with surface(fleet, responses=KEPT) as server:
        first = await created(server, tools=TOOLS)
        (call,) = first["output"]
        # The AI SDK's next request: the server's items by id, all others in full.
        own = [{"role": "user", "content": "one"}, reference(call), result_of(call)]
        second = await created(server, input=own, tools=TOOLS)
        chained = await created(
            server, input=own[2:], tools=TOOLS, previous_response_id=first["id"]
        )
        listed = (await get(server, f"{second['id']}/input_items?order=asc")).json
        own_item = {"type": "item_reference", "id": listed["data"][2]["id"]}
        third = await created(server, input=[*own[:2], own_item], tools=TOOLS)
        unknown = await server.post(PATH, ask(input=[{"type": "item_reference", "id": "msg_1"}]))
        wrong = await server.post(
            PATH, ask(input=[{"type": "item_reference", "id": call["id"] + "9"}])
        )
    assert second["output"][0]["content"][0]["text"] == "It is warm."
    assert prompt(server, 1) == prompt(server, 2) == prompt(server, 3)
    assert f"{call['call_id']}=weather({{}})" in prompt(server, 1)
    assert chained["output"][0]["id"] != third["output"][0]["id"]
    for refused in (unknown, wrong):
        assert (refused.status, refused.error["param"]) == (404, "input.0.id")
        assert GONE in refused.error["message"]


async def test_an_id_of_a_megabyte_is_looked_at_once() -> None:
    # A search from each of its letters on would take a quarter of an hour.
    long = {"type": "item_reference", "id": "a" * MIB}
    answer = await posted(PATH, ask(input=[long]))
    assert (answer.status, answer.error["param"]) == (404, "input.0.id")


async def test_the_items_of_a_request_are_listed_with_ids() -> None:
    fleet = FakeFleet(calls_first)
    history = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": "hm"},
        {"role": "assistant", "content": "Yes?"},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "warm"},
    ]
    async with surface(fleet, responses=KEPT) as server:
        response = await created(server, input=history, tools=TOOLS)
        newest_first = (await get(server, f"{response['id']}/input_items")).json
        listed = (await get(server, f"{response['id']}/input_items?order=asc")).json
        paged = await get(server, f"{response['id']}/input_items?limit=2")
        streamed = await get(server, f"{response['id']}?stream=true")
    items = listed["data"]
    assert newest_first["data"] == items[::-1]
    assert [item["type"] for item in items] == [
        *("message", "message", "reasoning", "message", "function_call", "function_call_output")
    ]
    texts = [item["content"][0] for item in items[:4]]
    assert [(part["type"], part["text"]) for part in texts] == [
        ("input_text", "be kind"),
        ("input_text", "hi"),
        ("reasoning_text", "hm"),
        ("output_text", "Yes?"),
    ]
    assert (items[4]["call_id"], items[5]["output"]) == ("a", "warm")
    assert items[2]["id"] == "rs_1"
    assert len({item["id"] for item in items}) == len(items)
    assert (listed["first_id"], listed["last_id"]) == (items[0]["id"], items[-1]["id"])
    assert listed["has_more"] is False
    assert (paged.status, paged.error["param"]) == (400, "limit")
    assert (streamed.status, streamed.error["param"]) == (400, "stream")


async def test_another_tenants_responses_are_not_there() -> None:
    tenancy = Tenancy(tenants_of(tenant("alice", "a"), tenant("bob", "b")))
    async with surface(tenancy=tenancy, responses=KEPT) as server:

        async def post(key: str, **more: object) -> Answer:
            return await server.post(PATH, ask(**more), headers={"authorization": f"Bearer {key}"})

        response = (await post("a")).json
        (item,) = response["output"]
        assert (await get(server, response["id"], "a")).status == 200
        for path in (response["id"], f"{response['id']}/input_items"):
            assert (await get(server, path, "b")).status == 404
        headers = {"authorization": "Bearer b"}
        deleted = await server.request("DELETE", f"{PATH}/{response['id']}", headers=headers)
        assert deleted.status == 404
        assert (await post("b", previous_response_id=response["id"])).status == 400
        assert (await post("b", input=[reference(item)])).status == 404
        assert (await post("a", previous_response_id=response["id"])).status == 200


async def test_a_response_that_nobody_uses_is_gone_after_its_time(mock_clock: MockClock) -> None:
    async with surface(responses=StoredResponsesConfig(ttl_s=60.0)) as server:
        first = await created(server)
        await pass_time(mock_clock, 59.0)
        second = await created(server, previous_response_id=first["id"])
        await pass_time(mock_clock, 59.0)
        assert (await get(server, first["id"])).status == 200, "each use restarts its time to live"
        await pass_time(mock_clock, 2.0)
        assert (await get(server, second["id"])).status == 404
        await pass_time(mock_clock, 60.0)
        gone = await get(server, first["id"])
        assert not len(server.services.responses)
    assert gone.status == 404
    for why in ("for 60 s after its last use", "server process", "restart", "store: false"):
        assert why in gone.error["message"]


async def test_a_restart_loses_them_and_the_error_says_so() -> None:
    async with surface(responses=KEPT) as server:
        response = await created(server)
    lost = await posted(PATH, ask(previous_response_id=response["id"]), responses=KEPT)
    assert (lost.status, lost.error["param"]) == (400, "previous_response_id")
    assert response["id"] in lost.error["message"]
    assert "the server restarts" in lost.error["message"]


async def test_an_answer_that_is_given_twice_is_stored_once() -> None:
    async with surface(responses=KEPT) as server:
        key = {"idempotency-key": "k"}
        first, again = [await server.post(PATH, ask(), headers=key) for _ in range(2)]
        assert again.headers["idempotency-replayed"] == "true"
        assert first.json == again.json
        assert len(server.services.responses) == 1
        assert (await get(server, first.json["id"])).json == first.json


async def test_a_failed_stream_and_a_cut_answer_are_stored_as_they_ended() -> None:
    def script(generation: FakeGeneration) -> None:
        generation.say("half")
        if b"fail" in bytes(generation.request.prompt_ids):
            generation.fail(no_worker("the worker died"))
        else:
            generation.finish(FinishReason.LENGTH)

    async with surface(FakeFleet(script), responses=KEPT) as server:
        cut = await created(server)
        failed = await created(server, input="fail", stream=True)
        unseen = await server.post(PATH, ask(input="fail"))
        assert unseen.status == 503
        assert len(server.services.responses) == 2, "the third one's id was never sent"
        for response, status in ((cut, "incomplete"), (failed, "failed")):
            shown = (await get(server, response["id"])).json
            assert shown == response
            assert shown["status"] == status


async def test_a_websocket_and_http_share_what_is_stored() -> None:
    async with surface(responses=KEPT) as server:
        over_http = await created(server)
        async with await open_socket(server) as socket:
            create = {"type": "response.create", **ask(previous_response_id=over_http["id"])}
            stored = await socket.response(create)
            private = {"type": "response.create", **ask(store=False)}
            own = await socket.response(private)
            await socket.answer(private | {"previous_response_id": own["id"]})
        assert (await get(server, stored["id"])).json == stored
        assert (await get(server, own["id"])).status == 404
        await created(server, previous_response_id=stored["id"])
    assert prompt(server).count("Hello there") == 2


@pytest.mark.parametrize("as_references", [False, True])
async def test_what_is_gone_on_from_is_bounded_as_a_request_is(as_references: bool) -> None:
    async with surface(responses=KEPT, max_body_bytes=4_000) as server:
        first = await created(server, input="x" * 1_200)
        if as_references:
            listed = (await get(server, f"{first['id']}/input_items")).json["data"]
            more = ask(input=[reference(listed[0])] * 4)
        else:
            second = await created(server, input="x" * 1_200, previous_response_id=first["id"])
            more = ask(input="x" * 1_200, previous_response_id=second["id"])
        refused = await server.post(PATH, more)
        many = [reference(first["output"][0])] * 20
        assert (await server.post(PATH, ask(input=many))).status == 200
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert "more than 4000 bytes" in refused.error["message"]


async def test_metrics_show_what_is_stored() -> None:
    async with surface(responses=KEPT) as server:
        before = (await server.request("GET", "/metrics")).body.decode()
        await created(server)
        after = (await server.request("GET", "/metrics")).body.decode()
        used = server.services.responses.used_bytes
    assert "triolet_response_store_answers 0.0" in before
    assert "triolet_response_store_answers 1.0" in after
    assert f"triolet_response_store_bytes {float(used)}" in after
    assert used > ENTRY_BYTES


@pytest.mark.parametrize("config", [KEPT, StoredResponsesConfig()], ids=["kept", "off"])
async def test_the_document_says_what_needs_state(config: StoredResponsesConfig) -> None:
    document = (await requested("GET", "/openapi.json", responses=config)).json
    assert f"{PATH}/{{response_id}}/input_items" in document["paths"]
    schemas = document["components"]["schemas"]
    stateless = {"previous_response_id": {"type": "null"}, "store": {"enum": [None, False]}}
    refused = {"type": {"not": {"const": "item_reference"}}}
    for name, condition in (("ResponseRequest", stateless), ("InputItem", refused)):
        assert ({"properties": condition} in schemas[name]["allOf"]) is (config is not KEPT)


def ended(number: int) -> ResponseEvents:
    """Return a response that has ended, with one input item."""
    fields = read_request(ResponseRequest, ask())
    request = GenerationRequest(bytes(16), (1, 2), SamplingParams(), 1.0)
    events = ResponseEvents(
        response_head(f"resp_{number:032x}", fields, request, MODEL), fields, message_frame
    )
    events.own_items = [InputItem.model_construct(type="message", role="user", content="hi")]
    return events


@pytest.mark.slow
async def test_a_hundred_thousand_responses_of_one_tenant_push_out_its_own_only() -> None:
    store = ResponseStore(StoredResponsesConfig(ttl_s=3600, max_bytes=4 * MIB))
    quiet, flood = Keeper(b"quiet"), Keeper(b"flood")
    for number in range(100):
        remember(store, quiet, ended(number))
    held = store.held_by(quiet.tenant)
    answer = bytes(1_000)
    for number in range(100_000):
        store.keep(b"flood resp_%d" % number, answer, flood, now=0.0)
    store.check_invariants()
    assert store.held_by(quiet.tenant) == held
    assert store.used_bytes <= 4 * MIB
    assert store.gone["evicted"] > 90_000
    assert store.find(b"flood resp_99999", 0.0) is not None
    assert store.find(b"flood resp_0", 0.0) is None


async def test_a_websocket_forgets_its_oldest_responses_first() -> None:
    store = ResponseStore(replace(OF_CONNECTION, max_bytes=5_000))
    for number in range(10):
        remember(store, ANYBODY, ended(number))
    kept = [number for number in range(10) if store.find(b" resp_%032x" % number, 0.0)]
    assert kept == list(range(10 - len(kept), 10))
    assert 0 < len(kept) < 10
    assert store.used_bytes <= 5_000


async def test_what_a_response_takes_is_its_input_and_its_answer_as_they_are_written() -> None:
    store = ResponseStore(KEPT)
    events = ended(1)
    remember(store, Keeper(b"alice"), events)
    small = store.used_bytes
    assert isinstance(events.own_items, list)
    events.own_items.append(
        InputItem.model_construct(type="message", role="user", content="x" * 10_000)
    )
    remember(store, Keeper(b"alice"), events)
    assert len(store) == 1
    assert 10_000 < store.used_bytes - small < 10_500
