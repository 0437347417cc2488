"""Tests of the endpoints beside generation: health checks, models, tokenizer, metrics, the chat
page, and host names."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from server.api.operations.pages import STATIC_DIR
from tests.server.support.fakes import FakeWorker
from tests.server.support.surface import MODEL, requested, surface
from transport.frames import Load
from triolet.ids import Role

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/health/live", "/ping"])
async def test_a_process_without_workers_is_live(path: str) -> None:
    async with surface() as server:
        server.fleet.status().workers.clear()
        answer = await server.request("GET", path)
    assert (answer.status, answer.json["status"]) == (200, "live")


@pytest.mark.parametrize("path", ["/health/ready", "/health"])
async def test_it_is_ready_only_with_a_worker_of_each_role(path: str) -> None:
    async with surface() as server:
        with_both = await server.request("GET", path)
        server.fleet.status().workers[1].state = "dead"
        without = await server.request("GET", path)
        server.fleet.status().workers[1].state = "alive"
        again = await server.request("GET", path)
    assert (with_both.status, without.status, again.status) == (200, 503, 200)
    assert without.error["code"] == "no_worker"
    assert "decode" in without.error["message"]


async def test_who_is_there_is_shown_by_name() -> None:
    async with surface() as server:
        workers = server.fleet.status().workers
        workers[1].state = "suspect"
        unknown = FakeWorker(Role.DECODE, "ipc:///x", capacity=None)
        other = FakeWorker(Role.DECODE, "decode-8", fingerprint="another")
        workers += [unknown, other, FakeWorker(Role.DECODE, "decode-9")]
        answer = await server.request("GET", "/health/ready")
    states = {workers[0].name: "alive", workers[1].name: "suspect", "decode-9": "alive"}
    states["decode-8"] = "another_model"
    assert answer.json["workers"] == states


async def test_what_keeps_a_worker_away_is_said_whether_ready_or_not() -> None:
    async with surface() as server:
        decode = server.fleet.status().workers[1]
        decode.trouble, decode.address = "refused our key abcdefgh…", "tcp://10.0.0.5:7001"
        ready = await server.request("GET", "/health/ready")
        decode.state = "connecting"
        unready = await server.request("GET", "/health/ready")
        shown = await server.request("GET", "/fleet/status")
    words = "decode at tcp://10.0.0.5:7001 refused our key abcdefgh…"
    assert ready.json["troubles"] == [words]
    assert unready.error["message"].startswith(f"no live worker for decode; {words}")
    assert shown.json["workers"][1]["trouble"] == decode.trouble
    assert shown.json["workers"][1]["labels"] == decode.labels == {"zone": "eu-1a"}


async def test_a_process_with_a_successor_answers_and_asks_to_be_left() -> None:
    async with surface() as server:
        before = await server.request("GET", "/health/ready")
        server.services.state.hand_over()
        ready = await server.request("GET", "/health/ready")
        chat = await server.post("/v1/chat/completions", CHAT)
    assert "connection" not in before.headers
    for answer in (ready, chat):
        assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_a_draining_process_is_live_not_ready_and_takes_nothing() -> None:
    async with surface() as server:
        server.services.state.drain()
        live = await server.request("GET", "/health/live")
        ready = await server.request("GET", "/health/ready")
        chat = await server.post("/v1/chat/completions", CHAT)
        completion = await server.post("/v1/completions", {"prompt": "hi"})
    assert live.status == 200
    for answer in (ready, chat, completion):
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["connection"] == "close"


async def test_version_and_load() -> None:
    async with surface() as server:
        server.fleet.status().queued, server.fleet.status().running = 2, 3
        version = await server.request("GET", "/version")
        load = await server.request("GET", "/load")
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", version.json["version"])
    assert load.json == {"server_load": 5, "queued": 2, "running": 3}


async def test_text_becomes_tokens_and_text_again() -> None:
    async with surface() as server:
        tokens = await server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
        chat = await server.post("/tokenize", {"messages": CHAT["messages"]})
        text = await server.post("/detokenize", {"tokens": tokens.json["tokens"]})
        neither = await server.post("/tokenize", {})
        unknown = await server.post("/detokenize", {"tokens": [300]})
    assert tokens.json["tokens"] == list("hé".encode())
    assert tokens.json["count"] == len(tokens.json["token_strs"]) == 3
    assert bytes(chat.json["tokens"]).decode() == "user: hi\nassistant:"
    assert text.json == {"prompt": "hé"}
    assert (neither.status, neither.error["param"]) == (400, "prompt")
    assert (unknown.status, unknown.error["param"]) == (400, "tokens")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "//v1/models", 400),
        ("GET", "/static/../main.py", 404),
        ("GET", "/static/%2e%2e/main.py", 404),
        ("GET", "/static/..%2fmain.py", 404),
        ("GET", "/static//etc/passwd", 404),
        ("GET", "/static/", 404),
        ("POST", "/v1/audio/speech", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("TRACE", "/metrics", 405),
        ("POST", "/health/live", 405),
        ("PUT", "/v1/responses", 405),
        ("GET", "/v1/responses", 405),
    ],
)
async def test_what_is_not_there_says_so_in_json(method: str, path: str, status: int) -> None:
    answer = await requested(method, path)
    assert answer.status == status
    assert answer.error["message"]
    assert ("allow" in answer.headers) == (status == 405)


async def test_a_websocket_asked_without_its_handshake_names_both_ways() -> None:
    answer = await requested("GET", "/v1/responses")
    assert answer.error["message"] == "this path accepts POST, and WebSockets"


async def test_pools_and_their_bytes_are_in_the_metrics() -> None:
    async with surface() as server:
        prefill, decode = server.fleet.status().workers
        prefill.load = Load(free_blocks=200, cached_blocks=40, leased_blocks=16, kv_bytes=4096)
        decode.load = Load(
            free_blocks=192, leased_blocks=64, kv_bytes=4000, preemptions=2, kv_shared_bytes=3000
        )
        server.fleet.status().queued, server.fleet.status().running = 1, 4
        answer = await server.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = set(answer.body.decode().splitlines())
    labels = 'engine="0",model_name="demo"'
    assert {
        'triolet_kv_blocks{pool="prefill",state="cached",worker="prefill-0"} 40.0',
        'triolet_kv_blocks{pool="decode",state="leased",worker="decode-0"} 64.0',
        'triolet_kv_blocks{pool="decode",state="free",worker="decode-0"} 192.0',
        'triolet_kv_bytes_sent_total{worker="prefill-0"} 4096.0',
        'triolet_kv_bytes_received_total{worker="decode-0"} 4000.0',
        'triolet_kv_bytes_shared_total{role="decode",worker="decode-0"} 3000.0',
        'triolet_worker_up{role="decode",worker="decode-0"} 1.0',
        'triolet_kv_block_tokens{pool="decode",worker="decode-0"} 16.0',
        'triolet_kv_block_bytes{pool="prefill",worker="prefill-0"} 1024.0',
        "triolet_requests_queued 1.0",
        "triolet_connections 1.0",
        f"vllm:num_requests_waiting{{{labels}}} 1.0",
        f"vllm:num_requests_running{{{labels}}} 4.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:num_preemptions_total{{{labels}}} 2.0",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="256"} 1.0',
    } <= lines


async def test_a_model_is_described_in_the_words_of_both_apis() -> None:
    async with surface() as server:
        listed = (await server.request("GET", "/v1/models")).json
        model = (await server.request("GET", f"/v1/models/{MODEL}")).json
    assert listed["data"] == [model]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
    assert (model["object"], model["type"]) == ("model", "model")
    assert (model["id"], model["display_name"]) == (MODEL, MODEL)
    created = datetime.fromisoformat(model["created_at"])
    assert created.timestamp() == model["created"]


async def test_metrics_go_by_their_own_names_only_if_told_so() -> None:
    answer = await requested("GET", "/metrics", metrics_compat="none")
    assert b"vllm:" not in answer.body
    assert b"triolet_requests_received_total" in answer.body


async def test_requests_are_counted_by_route_and_errors_by_status() -> None:
    async with surface() as server:
        await server.request("GET", "/nope")
        await server.request("GET", "/v1/models/nobody")
        answer = await server.request("GET", "/metrics")
    assert b'triolet_http_errors_total{status="404"} 2.0' in answer.body
    assert b'triolet_http_requests_total{endpoint="none"} 1.0' in answer.body
    # A name made up by a client must not become a label.
    assert b'{endpoint="GET /v1/models/<path:name>"} 1.0' in answer.body


@pytest.mark.parametrize("path", ["/health/ready", "/health"])
async def test_a_probe_of_readiness_that_is_told_no_is_no_error(path: str) -> None:
    async with surface() as server:
        server.fleet.status().workers.clear()
        assert (await server.request("GET", path)).status == 503
        assert (await server.request("GET", path, headers={"Host": "elsewhere"})).status == 403
        answer = await server.request("GET", "/metrics")
    assert b'triolet_http_errors_total{status="503"}' not in answer.body
    assert b'triolet_http_errors_total{status="403"} 1.0' in answer.body
    assert f'triolet_http_requests_total{{endpoint="GET {path}"}}'.encode() in answer.body


async def test_the_page_and_its_files_come_under_a_strict_policy() -> None:
    async with surface() as server:
        page = await server.request("GET", "/")
        files = [path.name for path in STATIC_DIR.iterdir() if path.suffix == ".js"]
        scripts = [await server.request("GET", f"/static/{name}") for name in files]
        again = await server.request(
            "GET", "/", headers={"If-None-Match": page.headers["etag"], "Host": "localhost:1"}
        )
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "connect-src 'self' ws://127.0.0.1 wss://127.0.0.1;" in policy
    assert "unsafe" not in policy
    assert scripts
    assert {script.headers["content-type"] for script in scripts} == {
        "text/javascript; charset=utf-8"
    }
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:80", "[::1]:8000", "127.0.0.1:1"]
)
async def test_names_of_this_machine_are_answered(host: str) -> None:
    assert (await requested("GET", "/version", headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.nip.io", 403),
        ("x/stats?", 400),
        ("a b", 400),
        ("localhost:99999999", 400),
        ("[::1", 400),
    ],
)
async def test_other_names_are_not(host: str, status: int) -> None:
    async with surface() as server:
        for method, path in (("GET", "/"), ("GET", "/health/live"), ("POST", "/tokenize")):
            answer = await server.request(method, path, headers={"Host": host})
            assert answer.status == status
            assert answer.error["message"]


async def test_behind_a_public_address_any_name_may_stand() -> None:
    answer = await requested(
        "GET",
        "/version",
        headers={"Host": "llm.example"},
        host="0.0.0.0",
        allow_remote_clients=True,
    )
    assert answer.status == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("file://", 403),
        ("http://[", 403),
    ],
)
async def test_other_pages_cannot_post(origin: str, status: int) -> None:
    async with surface() as server:
        answer = await server.post("/v1/chat/completions", CHAT, headers={"Origin": origin})
        assert len(server.fleet.generations) == (1 if status == 200 else 0)
    assert answer.status == status


async def test_a_request_id_that_could_split_a_header_is_replaced() -> None:
    async with surface() as server:
        for bad in ("x" * 200, "a b", "é"):
            answer = await server.request("GET", "/version", headers={"X-Request-Id": bad})
            assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_models_have_a_context_length() -> None:
    answer = await requested("GET", "/v1/models")
    (card,) = answer.json["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 4096)
