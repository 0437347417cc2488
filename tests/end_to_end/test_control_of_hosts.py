"""Tests of `triolet control` with servers on two hosts: it moves a model name while streams run,
and of two controls the later one wins."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest
import trio

from ops.models.model_directory import demo_model_path
from ops.ports import bind_port
from tests import forked
from tests.ops.control.test_several_hosts import ControlRole, free_address, switch, until_known
from transport.zmq_curve import make_keys

from . import paced
from .fleet_process import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

HOSTS: Final = {"a": "127.0.0.1", "b": "127.0.0.2"}
VERSIONS: Final = {"chat": f"sha256:{'1' * 64}", "chat-v2": f"sha256:{'2' * 64}"}
"""Digests by the name of the version."""
CLIENTS: Final = 2
"""For each server, one request after the other."""
NUM_TOKENS: Final = 20
BODY: Final[dict[str, Any]] = {
    "model": "chat",
    "prompt": "Once upon a time",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 7,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class Hosts:
    """A decode worker for each version, and a server on each of two addresses.

    Attributes:
      urls: URLs of the servers.
      controls: addresses of controls that they know.
      answers: version and text of each whole answer, in order of their ends.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.keys = str(folder / "keys")
        make_keys(folder / "keys")
        self.controls = [free_address(), free_address()]
        self.answers: list[tuple[str, str]] = []
        self._stack = stack
        workers = {version: free_address() for version in VERSIONS}
        for version, address in workers.items():
            self._start(
                f"decode of {version}",
                "decode",
                str(demo_model_path()),
                *("--set", f"decode.name={version}-0", "--set", f"decode.curve_dir={self.keys}"),
                *("--set", f"decode.control_address={address}"),
                *("--set", f"decode.kv_address={free_address()}"),
                *("--set", "decode.engine.kv_pool_bytes=16MiB"),
                *("--set", "decode.engine.dtype=float32"),
            )
        self.urls = [self._start_server(*host, workers) for host in HOSTS.items()]

    def _start_server(self, name: str, host: str, workers: dict[str, str]) -> str:
        port = self._stack.enter_context(bind_port(host, 0)).getsockname()[1]
        models = "".join(
            f'[[server.models]]\nname = "{version}"\nmodel_dir = "{demo_model_path()}"\n'
            f'digest = "{VERSIONS[version]}"\n'
            f'decode_addresses = ["{address}"]\n'
            for version, address in workers.items()
        )
        settings = self.folder / f"{name}.toml"
        settings.write_text(
            f'[server]\nhost = "{host}"\nport = {port}\ncurve_dir = "{self.keys}"\n'
            f"control_addresses = {json.dumps(self.controls)}\n"
            f'[server.routing]\nlocal_prefill = "always"\n{models}'
        )
        self._start(f"server {name}", "server", "--config", str(settings))
        return f"http://{host}:{port}"

    def _start(self, name: str, *arguments: str) -> None:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = forked.Popen(
            [*paced.COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def control(self, number: int) -> ControlRole:
        role = ControlRole(self.controls[number], self.keys, self.folder / f"control-{number}")
        self._stack.callback(role.close)
        return role

    async def wait_ready(self, url: str) -> None:
        """Wait until a server has workers of both versions."""
        async with httpx2.AsyncClient() as client:
            states: set[str] = set()
            while states != {"serving"}:
                with suppress(httpx2.TransportError):
                    shown = (await client.get(f"{url}/v1/models")).json()["data"]
                    states = {one["state"] for one in shown}
                await trio.sleep(0.05)

    async def ask(self, url: str) -> None:
        """Send one request after another; each must get exactly one complete answer."""
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            while True:
                with trio.CancelScope(shield=True):
                    answer = client.stream("POST", f"{url}/v1/completions", json=BODY)
                    text, num_tokens, is_done = "", 0, False
                    async with answer as stream:
                        assert stream.status_code == 200, await stream.aread()
                        version = stream.headers["x-triolet-model-version"]
                        async for line in stream.aiter_lines():
                            is_done |= line == "data: [DONE]"
                            if line.startswith("data: {"):
                                chunk = json.loads(line.removeprefix("data: "))
                                text += "".join(one["text"] for one in chunk["choices"])
                                num_tokens = (chunk["usage"] or {}).get("completion_tokens", 0)
                    assert (num_tokens, is_done) == (NUM_TOKENS, True), text
                    self.answers.append((version, text))
                await trio.lowlevel.checkpoint()

    async def until_only(self, version: str) -> None:
        """Wait for as many consecutive answers from one version as there are clients."""
        begun = len(self.answers)
        count = len(self.urls) * CLIENTS
        last: list[str] = []
        while last != [VERSIONS[version]] * count:
            await trio.sleep(0.02)
            last = [one for one, _ in self.answers[begun:][-count:]]

    def revisions(self, name: str) -> list[str]:
        """Return the lines about changed routes in a server's log."""
        lines = (self.folder / f"server {name}.log").read_text().splitlines()
        return [line for line in lines if "routes_changed" in line]


async def test_two_controls_at_once_cut_no_stream_and_move_nothing_twice(tmp_path: Path) -> None:
    with ExitStack() as stack, trio.fail_after(PATIENCE_S):
        hosts = Hosts(tmp_path, stack)
        for url in hosts.urls:
            await hosts.wait_ready(url)
        async with trio.open_nursery() as nursery:
            for url in hosts.urls * CLIENTS:
                nursery.start_soon(hosts.ask, url)
            await hosts.until_only("chat")
            first = hosts.control(0)
            folder = await first.wait_ready()
            await until_known(folder)
            assert (await switch(folder, "chat-v2"))["status"] == "done"
            await hosts.until_only("chat-v2")
            first.process.send_signal(signal.SIGSTOP)
            second = hosts.control(1)
            folder = await second.wait_ready()
            await until_known(folder)
            assert (await switch(folder, "chat"))["status"] == "done"
            first.process.send_signal(signal.SIGCONT)
            assert (await first.said_at_the_end())[0] == 2
            await hosts.until_only("chat")
            second.process.kill()
            await hosts.until_only("chat")  # without any control
            nursery.cancel_scope.cancel()
        assert len({text for _, text in hosts.answers}) == 1, "both versions are one model"
        for name in HOSTS:
            first_move, second_move = hosts.revisions(name)
            assert '{"chat": 1}' in first_move
            assert '{"chat": 2}' in second_move
