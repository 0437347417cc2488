"""Tests of two model versions behind one public name: clients see only the name, and each request
stays on its version."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from server.tenants.tenancy import Tenancy
from tests.server.api.test_many_models import CODE, COMPLETIONS, DIGEST, TURN, VECTORS, two_models
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import MODEL, PATIENCE_S
from tests.server.support.tenants import tenant, tenants_of
from tests.server.support.websocket import open_socket
from transport.rollout_protocol import RolloutPhase, RolloutView
from triolet.config import AdapterConfig, AutoConfig
from triolet.config.routes import NUM_BUCKETS, Route, RouteCaps, RoutesConfig, user_hash
from triolet.errors import invalid_request, overloaded
from triolet.tenants.plans import TenantRole

if TYPE_CHECKING:
    from server.contract.generation import AssignedVersion
    from tests.server.api.test_many_models import TwoModels
    from tests.server.support.fakes import FakeGeneration

CHAT = "chat"
VERSION = "x-triolet-model-version"


def route_to(version: str, revision: int) -> dict[str, Route]:
    other = {MODEL: CODE, CODE: MODEL}[version]
    return {CHAT: Route({version: 1, other: 0}, version, revision)}


HALF = Route({MODEL: 0.5, CODE: 0.5}, MODEL, 1)
ROLLED_BACK = Route({MODEL: 1.0, CODE: 0.0}, MODEL, 2)


def version_of(user: str, tenant: str = "") -> str:
    """Return the version that HALF assigns to a user."""
    return HALF.version_for(tenant, str(user_hash(tenant, user) % NUM_BUCKETS), 0.0)


def users_of(version: str, tenant: str = "") -> list[str]:
    return [user for n in range(40) if version_of(user := f"user-{n}", tenant) == version]


def latest(models: TwoModels) -> AssignedVersion | None:
    """Return the version that a route assigned to the latest request."""
    last = [*models.demo.generations, *models.code.generations][-1:]
    inputs = [*models.demo.inputs[:1], *models.code.inputs[:1]]  # only the first one is evidence
    return [*(one.request for one in last), *inputs][-1].assigned


def clear(models: TwoModels) -> None:
    for fleet in (models.demo, models.code):
        fleet.generations.clear()
        fleet.inputs.clear()


@pytest.mark.parametrize(("path", "body"), COMPLETIONS + VECTORS[:1] + VECTORS[3:])
async def test_answers_have_the_public_name_and_are_of_the_version_of_the_route(
    path: str, body: dict[str, Any]
) -> None:
    async with two_models() as models:
        for version, counts, digest in ((MODEL, (1, 0), None), (CODE, (1, 1), DIGEST)):
            models.server.services.models.change(route_to(version, 1))
            answer = await models.server.post(path, body | {"model": CHAT})
            assert answer.status == 200, answer.body
            assert (models.counts, answer.headers.get(VERSION)) == (counts, digest)
            if b'"model"' in answer.body:
                assert b'"model":"chat"' in answer.body.replace(b": ", b":")


async def test_a_route_is_listed_once_and_its_versions_are_no_names() -> None:
    async with two_models() as models:
        models.server.services.models.change(route_to(CODE, 1))
        listed = (await models.server.request("GET", "/v1/models")).json["data"]
        assert [(one["id"], one["root"], one["digest"]) for one in listed] == [
            (CHAT, CHAT, DIGEST),
            ("coder", CHAT, DIGEST),
        ]
        body = {"messages": [TURN]}
        for name, status in ((MODEL, 404), (CODE, 404), ("coder", 200), (CHAT, 200)):
            answer = await models.server.post("/v1/chat/completions", body | {"model": name})
            assert answer.status == status
        status = (await models.server.request("GET", "/fleet/status")).json
        assert [one["name"] for one in status["models"]] == [MODEL, CODE], (
            "each version has its own queue"
        )


async def test_a_repeat_gets_the_answer_of_the_version_that_it_began_on() -> None:
    async with two_models() as models:
        headers = {"idempotency-key": "one"}
        body = {"model": CHAT, "messages": [TURN], "stream": True}
        for version in (CODE, MODEL):
            models.server.services.models.change(route_to(version, 1))
            answer = await models.server.post("/v1/chat/completions", body, headers=headers)
            assert (answer.headers[VERSION], models.counts) == (DIGEST, (0, 1))
        assert answer.headers["idempotency-replayed"] == "true"


async def test_a_ladder_names_the_route_and_a_request_keeps_its_version() -> None:
    async with two_models(auto=AutoConfig(ladder=(CHAT,))) as models:
        table = models.server.services.models
        table.change(route_to(CODE, 1))
        text = table.named(CHAT).text
        encode = text.encode

        async def encode_while_the_route_moves(*args: Any, **fields: Any) -> tuple[int, ...]:  # noqa: ANN401
            table.change(route_to(MODEL, 2))
            return await encode(*args, **fields)

        text.encode = encode_while_the_route_moves  # type: ignore[method-assign]
        body = {"model": "auto", "messages": [TURN]}
        answer = await models.server.post("/v1/chat/completions", body)
        assert (answer.json["model"], answer.headers[VERSION]) == (CHAT, DIGEST)
        assert models.counts == (0, 1)


async def test_a_route_that_has_expired_gives_the_stable_version() -> None:
    async with two_models() as models:
        services = models.server.services
        now_s = [9.9]
        object.__setattr__(services, "wall", lambda: now_s[0])
        route = Route({MODEL: 0, CODE: 1}, MODEL, 1, valid_until=10.0)
        services.models.change({CHAT: route})
        body = {"model": CHAT, "messages": [TURN]}
        assert VERSION in (await models.server.post("/v1/chat/completions", body)).headers
        now_s[0] = 10.0
        assert VERSION not in (await models.server.post("/v1/chat/completions", body)).headers
        assert models.counts == (1, 1)


@pytest.mark.parametrize(("path", "body"), COMPLETIONS + VECTORS)
async def test_requests_of_one_user_stay_together_on_every_endpoint(
    path: str, body: dict[str, Any]
) -> None:
    async with two_models() as models:
        models.server.services.models.change({CHAT: HALF})
        for version in (MODEL, CODE):
            user = users_of(version)[0]
            # The dialect of Ollama has no users.
            is_ollama = path.startswith("/api/")
            named = {} if is_ollama else {"user": user}
            headers = {"x-triolet-session": user if is_ollama else "other"}
            asked = body | {"model": CHAT} | named
            answer = await models.server.post(path, asked, headers=headers)
            assert answer.status == 200, answer.body
            found = latest(models)
            assert found is not None
            assert (found.model, found.version, found.user) == (
                CHAT,
                version,
                user_hash("", user),
            )
            clear(models)


async def test_of_several_choices_or_inputs_the_first_is_evidence() -> None:
    async with two_models() as models:
        models.server.services.models.change({CHAT: HALF})
        body = {"model": CHAT, "prompt": ["Hi", "Ho"], "n": 2}
        await models.server.post("/v1/completions", body)
        await models.server.post("/v1/embeddings", {"model": CHAT, "input": ["Hi", "Ho"]})
        for fleet in (models.demo, models.code):
            asked = [*(one.request for one in fleet.generations), *fleet.inputs]
            begun = [one for one in (fleet.generations[:1], fleet.inputs[:1]) if one]
            assert sum(one.assigned is not None for one in asked) == len(begun)
        assert len([*models.demo.inputs, *models.code.inputs]) == 2


async def test_the_first_of_the_names_of_a_user_counts() -> None:
    async with two_models() as models:
        models.server.services.models.change({CHAT: HALF})
        turns = [{"role": "system", "content": "Be kind"}, TURN]
        longer = [*turns, {"role": "assistant", "content": "Hello"}, TURN]
        for user, more, headers in (
            ("a", {"user": "a", "safety_identifier": "b"}, {"x-triolet-session": "c"}),
            ("b", {"safety_identifier": "b"}, {"x-triolet-session": "c"}),
            ("c", {}, {"x-triolet-session": "c"}),
            ("c", {"user": 7, "safety_identifier": ""}, {"x-triolet-session": "c"}),
            ("Hi", {}, {}),
            ("Hi", {"messages": longer}, {}),
            (
                "Hi",
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
                {},
            ),
        ):
            body: dict[str, Any] = {"model": CHAT, "messages": turns, **more}
            await models.server.post("/v1/chat/completions", body, headers=headers)
            found = latest(models)
            assert found is not None
            assert found.user == user_hash("", user), more
            clear(models)
        message = {"model": CHAT, "messages": [TURN], "max_tokens": 5, "metadata": {"user_id": "u"}}
        await models.server.post("/v1/messages", message)
        found = latest(models)
        assert found is not None
        assert found.user == user_hash("", "u")


async def test_users_of_a_tenant_stay_together_if_the_operator_wants_it() -> None:
    alice = Tenancy(tenants_of(tenant("alice", "key-a")))
    for key, together in (("user", False), ("tenant", True)):
        async with two_models(tenancy=alice, routes=RoutesConfig(key=key)) as models:  # type: ignore[arg-type]
            models.server.services.models.change({CHAT: HALF})
            found = set()
            for n in range(20):
                await models.server.post(
                    "/v1/completions",
                    {"model": CHAT, "prompt": "Hi", "user": f"user-{n}"},
                    headers={"authorization": "Bearer key-a"},
                )
                found.add(latest(models))
                clear(models)
            versions = {one.version for one in found if one is not None}
            assert (len(versions) == 1) is together
            assert ({one.user for one in found if one} == {user_hash("alice", "")}) is together


async def test_an_operator_names_a_version_and_it_is_no_evidence() -> None:
    operator = tenant("op", "key-o", role=TenantRole.OPERATOR)
    tenancy = Tenancy(tenants_of(operator, tenant("alice", "key-a")))
    async with two_models(tenancy=tenancy) as models:
        models.server.services.models.change({CHAT: ROLLED_BACK})
        body = {"model": CHAT, "messages": [TURN]}

        async def ask(key: str, version: str) -> tuple[int, tuple[int, int]]:
            headers = {"authorization": f"Bearer {key}", "x-triolet-version": version}
            answer = await models.server.post("/v1/chat/completions", body, headers=headers)
            return answer.status, models.counts

        assert await ask("key-o", CODE) == (200, (0, 1)), "also one without a share"
        assert latest(models) is None
        assert await ask("key-o", DIGEST) == (200, (0, 2))
        assert await ask("key-o", MODEL) == (200, (1, 2))
        assert await ask("key-a", CODE) == (403, (1, 2))
        assert await ask("key-o", "nothing") == (404, (1, 2))
        models.server.services.models.change({})
        assert await ask("key-o", "nothing") == (404, (1, 2)), "there is no model chat any more"


async def test_without_tenants_a_version_is_named_only_from_this_machine() -> None:
    async with two_models(auto=AutoConfig(ladder=(CHAT,))) as models:
        table = models.server.services.models
        table.set_adapters(MODEL, (AdapterConfig("sql", "/sql", "", "sha256:" + "a" * 64),))
        table.change({CHAT: ROLLED_BACK})
        named = {"x-triolet-version": CODE}
        forwarded = named | {"x-forwarded-for": "192.0.2.1"}
        for name, headers, status in (
            (CHAT, named, 200),
            (CHAT, forwarded, 403),
            (f"{CHAT}:sql", named, 404),
            (f"{CHAT}:sql", {"x-triolet-version": MODEL}, 200),
            ("auto", named, 400),
        ):
            body = {"model": name, "messages": [TURN]}
            answer = await models.server.post("/v1/chat/completions", body, headers=headers)
            assert answer.status == status, answer.body
        for headers, kind in ((named, "response.completed"), (forwarded, "error")):
            async with await open_socket(models.server, headers=headers) as socket:
                assert (await socket.answer(create(), kind))[-1]["type"] == kind
        assert models.counts == (1, 2)


async def test_an_excluded_tenant_is_no_evidence() -> None:
    alice = Tenancy(tenants_of(tenant("alice", "key-a")))
    async with two_models(tenancy=alice) as models:
        route = Route({MODEL: 0, CODE: 1}, MODEL, 1, excluded_tenants=("alice",))
        models.server.services.models.change({CHAT: route})
        body = {"model": CHAT, "prompt": "Hi"}
        headers = {"authorization": "Bearer key-a"}
        await models.server.post("/v1/completions", body, headers=headers)
        assert (models.counts, latest(models)) == ((1, 0), None)


def create(**more: object) -> dict[str, Any]:
    return {"type": "response.create", "model": CHAT, "input": "hi", **more}


async def test_the_first_message_decides_for_a_websocket_until_a_rollback() -> None:
    first = next(text for n in range(40) if version_of(text := f"hi {n}") == CODE)
    other = next(text for n in range(40) if version_of(text := f"ho {n}") == MODEL)
    async with two_models() as models:
        table = models.server.services.models
        table.change({CHAT: HALF})
        async with await open_socket(models.server) as socket:
            await socket.answer(create(input=first))
            began = latest(models)
            await socket.answer(create(input=other))
            assert (models.counts, latest(models)) == ((0, 2), began), "the same conversation"
            await socket.answer(create(input=first, user=users_of(MODEL)[0]))
            assert models.counts == (1, 2), "a user who is named counts for himself"
        async with await open_socket(models.server) as socket:
            await socket.answer(create(input=first))
            # A step moves new requests; the conversation stays, and says when it began.
            table.change({CHAT: Route({MODEL: 0.9, CODE: 0.1}, MODEL, 2, "another salt")})
            await socket.answer(create(input=other))
            assert models.counts == (1, 4)
            table.change({CHAT: Route({MODEL: 1.0, CODE: 0.0}, MODEL, 3)})
            await socket.answer(create(input=other))
            assert models.counts == (2, 4), "rolled back"


async def test_a_session_that_the_handshake_names_decides_for_all_messages() -> None:
    async with two_models() as models:
        models.server.services.models.change({CHAT: HALF})
        for version, counts in ((CODE, (0, 2)), (MODEL, (2, 2))):
            headers = {"x-triolet-session": users_of(version)[0]}
            async with await open_socket(models.server, headers=headers) as socket:
                for text in ("one", "two"):
                    await socket.answer(create(input=text))
            assert models.counts == counts


@pytest.mark.parametrize(
    ("caps", "running", "version"),
    [
        (RouteCaps(streams=3), [""] * 2, CODE),
        (RouteCaps(streams=3), [""] * 3, MODEL),
        (RouteCaps(tenant_share=0.5), ["alice"] * 2, CODE),  # fewer than four
        (RouteCaps(tenant_share=0.5), ["alice", "bob", "bob"], CODE),
        (RouteCaps(tenant_share=0.5), ["alice", "alice", "bob"], MODEL),
        (RouteCaps(), ["alice"] * 9, CODE),
    ],
)
async def test_beyond_a_cap_new_requests_get_the_stable_version_and_are_no_evidence(
    caps: RouteCaps, running: list[str], version: str
) -> None:
    alice = Tenancy(tenants_of(tenant("alice", "key-a")))
    async with two_models(tenancy=alice) as models:
        models.demo.running, models.code.running = ["alice"] * 9, running
        models.server.services.models.change(
            {CHAT: Route({MODEL: 0, CODE: 1}, MODEL, 1, caps=caps)}
        )
        body = {"model": CHAT, "prompt": "Hi"}
        headers = {"authorization": "Bearer key-a"}
        await models.server.post("/v1/completions", body, headers=headers)
        assert models.counts == ((0, 1) if version == CODE else (1, 0))
        assert (latest(models) is not None) is (version == CODE)


async def test_a_cap_moves_one_message_of_a_conversation_not_all_of_it() -> None:
    async with two_models() as models:
        route = Route({MODEL: 0, CODE: 1}, MODEL, 1, caps=RouteCaps(streams=1))
        models.server.services.models.change({CHAT: route})
        async with await open_socket(models.server) as socket:
            for running, counts in (([], (0, 1)), ([""], (1, 0)), ([], (0, 1))):
                models.code.running = running
                await socket.answer(create())
                assert models.counts == counts
                assert (latest(models) is None) is bool(running)
                clear(models)


async def test_a_version_without_the_adapter_is_no_evidence_for_the_one_that_answers() -> None:
    async with two_models() as models:
        table = models.server.services.models
        table.set_adapters(MODEL, (AdapterConfig("sql", "/sql", "", "sha256:" + "a" * 64),))
        table.change({CHAT: Route({MODEL: 0.0, CODE: 1.0}, MODEL, 1)})
        for name, counts, is_evidence in ((f"{CHAT}:sql", (1, 0), False), (CHAT, (0, 1), True)):
            await models.server.post("/v1/completions", {"model": name, "prompt": "Hi"})
            assert (models.counts, latest(models) is not None) == (counts, is_evidence)
            clear(models)


ALL = Route({MODEL: 0.0, CODE: 1.0}, MODEL, 1)


async def test_a_resumed_stream_ends_where_it_began_and_new_requests_do_not() -> None:
    async with two_models(code_fleet=FakeFleet(by_hand)) as models:
        table = models.server.services.models
        table.change({CHAT: ALL})
        body = {"model": CHAT, "messages": [TURN], "stream": True}
        path, key = "/v1/chat/completions", {"idempotency-key": "one"}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(models.server.post, path, body, headers=key))
            with trio.fail_after(PATIENCE_S):
                generation = await models.code.nth(0)
            generation.say("one ")
            table.change({CHAT: ROLLED_BACK})
            assert (await models.server.post(path, body)).headers.get(VERSION) is None
            assert models.counts == (1, 1)
            generation.say("two")
            generation.finish()
        resumed = await models.server.post(path, body, headers=key | {"last-event-id": "0"})
        assert (resumed.headers[VERSION], models.counts) == (DIGEST, (1, 1))
        assert b"two" in resumed.body


async def test_a_repeat_of_what_failed_before_a_rollback_gets_the_stable_version() -> None:
    def fail(generation: FakeGeneration) -> None:
        generation.fail(overloaded("the model failed", 1.0))

    async with two_models(code_fleet=FakeFleet(fail)) as models:
        table = models.server.services.models
        for route, status, counts in ((ALL, 503, (0, 1)), (ROLLED_BACK, 200, (1, 1))):
            table.change({CHAT: route})
            body = {"model": CHAT, "messages": [TURN]}
            headers = {"idempotency-key": "one"}
            answer = await models.server.post("/v1/chat/completions", body, headers=headers)
            assert (answer.status, models.counts) == (status, counts)


async def test_an_answer_on_a_websocket_ends_where_it_began() -> None:
    async with two_models(code_fleet=FakeFleet(by_hand)) as models:
        table = models.server.services.models
        table.change({CHAT: ALL})
        async with await open_socket(models.server) as socket:
            await socket.send(create())
            with trio.fail_after(PATIENCE_S):
                generation = await models.code.nth(0)
            table.change({CHAT: ROLLED_BACK})
            generation.say("two")
            generation.finish()
            while (event := await socket.event())["type"] != "response.completed":
                pass
            assert event["response"]["output"][0]["content"][0]["text"] == "two"
            await socket.answer(create())
        assert models.counts == (1, 1)


async def test_auto_chooses_the_version_for_each_request() -> None:
    async with two_models(auto=AutoConfig(ladder=(CHAT,))) as models:
        table = models.server.services.models
        for route, version, counts in ((ALL, CODE, (0, 1)), (ROLLED_BACK, MODEL, (1, 1))):
            table.change({CHAT: route})
            body = {"model": "auto", "messages": [TURN]}
            await models.server.post("/v1/chat/completions", body)
            assert models.counts == counts
            fleet = {CODE: models.code, MODEL: models.demo}[version]
            assigned = fleet.generations[-1].request.assigned
            assert assigned is not None
            assert (assigned.model, assigned.version) == (CHAT, version)


VIEW = RolloutView("r", CHAT, MODEL, CODE, "", RolloutPhase.CANARY, 1, (0.5, 1.0), 0.0, "")


def observed(models: TwoModels) -> list[tuple[str, set[str]]]:
    """Return version and missed objectives of each request that control is told of."""
    messages = models.server.services.metrics.rollouts.take("server")
    return [(one.version, {*one.missed}) for message in messages for one in message.requests]


async def test_a_request_that_fails_before_it_is_submitted_counts_for_its_version() -> None:
    async with two_models(fault="the test made this") as models:
        services = models.server.services
        services.models.change({CHAT: Route({MODEL: 0, CODE: 1}, MODEL, 1)})
        services.metrics.rollouts.hear((VIEW,))
        body = {"model": CHAT, "messages": [TURN]}
        path = "/v1/chat/completions"
        text = next(one for one in services.models if one.version == CODE).text

        async def ask(**more: object) -> int:
            return (await models.server.post(path, body | more)).status

        assert await ask() == 200
        assert observed(models) == [], "its end is an event of the scheduler"
        assert await ask(max_tokens=10**6) == 400
        assert observed(models) == [(CODE, {"rejected"})]
        for error, status, missed in (
            (invalid_request("the template raised", "messages"), 400, "rejected"),
            (ZeroDivisionError("the test made this"), 500, "errors"),
        ):

            async def fail(*_: object, error: Exception = error, **__: object) -> None:
                raise error

            text.render_chat = fail  # type: ignore[method-assign,assignment]
            assert await ask() == status
            assert observed(models) == [(CODE, {missed})]
        del text.render_chat
        models.code.refuse_with = overloaded("full", 1.0)
        assert await ask() == 503
        assert observed(models) == [(CODE, {"errors"})]
        async with await open_socket(models.server) as socket:
            await socket.send(create())
            assert (await socket.event())["type"] == "error"
        assert observed(models) == [(CODE, {"errors"})]
        services.models.change({CHAT: Route({MODEL: 1, CODE: 0}, MODEL, 2)})
        assert await ask(model="other") == 404
        assert observed(models) == [], "no version was chosen"


async def test_a_failure_after_submission_is_told_once() -> None:
    def fail(generation: FakeGeneration) -> None:
        generation.fail(overloaded("the model failed", 1.0))

    async with two_models(code_fleet=FakeFleet(fail)) as models:
        services = models.server.services
        services.models.change({CHAT: Route({MODEL: 0, CODE: 1}, MODEL, 1)})
        services.metrics.rollouts.hear((VIEW,))
        for more in ({}, {"idempotency-key": "one"}):
            body = {"model": CHAT, "messages": [TURN]}
            answer = await models.server.post("/v1/chat/completions", body, headers=more)
            assert answer.status == 503
        assert observed(models) == [], "its end is an event of the scheduler"
