"""Tests that nothing a client sends ever becomes a file path or a network address.

Python's audit hooks report each opened file and each connection of a server process, which receives
paths and addresses in every part of a request.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httpx2
import pytest

from tests.server.support.surface import surface
from tests.server.test_main import PATIENCE_S, ready_url, running

if TYPE_CHECKING:
    from pathlib import Path

WATCH: Final = """
import os, sys
_told = os.open({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def _tell(event, arguments):
    if event in ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
        os.write(_told, (event + " " + repr(arguments) + "\\n").encode())
sys.addaudithook(_tell)
"""
MARK: Final = "h0stile"
"""Part of every hostile value, so that none is overlooked."""
TEXT_PROCESS: Final = "'-m', 'server.text_process'"
"""One may start during the first requests, or again after seconds of silence."""
NEAR: Final = f"127.0.0.1:9/{MARK}"
PREFIXES: Final = (
    "", "/", "..", "../", "../../", "..%2f", "%2e%2e/", "..\\", "....//", "file:///", "\\\\host\\",
    "~/", "C:\\", "%00", "./", "/etc/", "/proc/self/", "\u2025/", "..;/", "..%c0%af",
)  # fmt: skip
SUFFIXES: Final = (
    MARK, f"{MARK}/passwd", f"{MARK}%00.js", f"{MARK}.json", f"{MARK}/../x",
    f"{MARK}\n", f"{MARK}?x", f"{MARK};x", f"{MARK}\u202e", f"{MARK}{'x' * 300}",
)  # fmt: skip
WORDS: Final = tuple(prefix + suffix for prefix, suffix in product(PREFIXES, SUFFIXES))
ADDRESSES: Final = (
    f"http://{NEAR}", f"https://{NEAR}", f"tcp://{NEAR}", f"ipc:///tmp/{MARK}", f"file:///{MARK}",
)  # fmt: skip


@pytest.mark.slow
async def test_no_word_of_a_client_finds_a_model_or_a_file() -> None:
    assert len(WORDS) == 200
    async with surface() as server:
        for index, word in enumerate(WORDS):
            for base in ("/v1/models/", "/static/"):
                answer = await server.request("GET", base + quote(word, safe="%/\\;~.:"))
                # An extra slash or a NUL may be refused earlier.
                assert answer.status in {400, 404}, (base, word, answer)
            if index % 4:
                continue
            body = {"model": word, "messages": [{"role": "user", "content": "hi"}]}
            answer = await server.post("/v1/chat/completions", body)
            assert (answer.status, answer.error["code"]) == (404, "model_not_found"), word
        assert server.fleet.generations == []


def requests() -> list[tuple[str, str, dict[str, Any]]]:
    """Requests with paths and addresses wherever possible."""
    messages = [{"role": "user", "content": ADDRESSES[0]}]
    found: list[tuple[str, str, dict[str, Any]]] = []
    for word in (*WORDS[::7], *ADDRESSES):
        found.append(("GET", "/v1/models/" + quote(word, safe=""), {}))
        found.append(("GET", "/static/" + quote(word, safe="/"), {}))
        for field in ("model", "user", "cache_salt", "chat_template", "file", "tools"):
            body = {"messages": messages, field: word}
            found.append(("POST", "/v1/chat/completions", {"json": body}))
        image = [{"type": "image_url", "image_url": {"url": word}}]
        pictured = {"messages": [{"role": "user", "content": image}]}
        found.append(("POST", "/v1/chat/completions", {"json": pictured}))
        found.append(("POST", "/tokenize", {"json": {"prompt": word}}))
        headers = {"x-forwarded-host": NEAR, "x-original-url": quote(word), "referer": ADDRESSES[0]}
        found.append(("GET", "/metrics", {"headers": headers}))
    return found


@pytest.mark.slow
def test_a_server_opens_no_file_and_connects_to_nobody_for_a_client(tmp_path: Path) -> None:
    told = tmp_path / "told"
    private = tmp_path / "links"
    private.mkdir()
    with running(private, fault=WATCH.format(path=str(told))) as process:
        url = ready_url(process)
        before = len(told.read_text().splitlines())
        assert before > 0, "no event: the audit hook does not work"
        with httpx2.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:

            def ask(request: tuple[str, str, dict[str, Any]]) -> int:
                method, path, more = request
                if method == "POST":
                    # There are no workers: a valid request would wait for one.
                    more = more | {"headers": {"x-request-timeout-ms": "100"}}
                return client.request(method, path, **more).status_code

            with ThreadPoolExecutor(8) as threads:
                statuses = list(threads.map(ask, requests()))
            assert client.get("/health/live").status_code == 200
        assert set(statuses) <= {200, 400, 404, 503, 504}
        lines = told.read_text().splitlines()[before:]
    touched = [
        line
        for line in lines
        if MARK in line or (line.split()[0] != "open" and TEXT_PROCESS not in line)
    ]
    assert not touched, json.dumps(touched[:5])
