"""Test helper that runs the commands of the documents in one shell, with separate fleets.

`triolet` in that shell is forked from the tests' template: starting an interpreter per command
would spend most of the time on imports. `curl` fails on HTTP errors even without `--fail`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import httpx2

from ops.ports import bind_port
from tests import forked
from tests.house.test_layout import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .shown import Shown

COMMAND_TIMEOUT_S: Final = 120.0
"""Enough to restart every process on a busy machine."""
STOP_TIMEOUT_S: Final = 60.0
ANSWER_S: Final = 30.0
POLL_S: Final = 0.01
PARTS: Final = ("out", "err", "end")
"""Files of one command: its output and its exit code."""
SHOWN: Final = 1000
"""Characters shown of a failed command's output."""
MAX_REQUEST_BYTES: Final = 128 * 1024
"""Limit for arguments and environment."""
FOREGROUND: Final = re.compile(r"^(?:make serve|triolet (?:serve|server|prefill|decode))\b")
BEGINS: Final = re.compile(r"^(?:make serve|triolet (?:serve|decode))\b")
"""Commands that start another fleet; the previous one is stopped first."""
URL: Final = re.compile(r'"url": ?"([^"]+)"')
"""A server's URL; the reader waits until it has workers."""
BEGUN: Final = '"stage"'
"""A worker's first output, enough to continue."""
TRIOLET: Final = f"""\
#!{sys.executable} -SE
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect(os.environ["STARTER"])
wanted = [os.getcwd(), dict(os.environ), *sys.argv[1:]]
socket.send_fds(asked, [json.dumps(wanted).encode()], [0, 1, 2])
sys.exit(int(asked.recv(64)))
"""
"""Forks a command with the shell's own files, and exits like it."""
CURL: Final = f"""\
#!/bin/bash
for word; do [[ $word =~ ^-[a-zA-Z]*f ]] && exec {shutil.which("curl")} "$@"; done
exec {shutil.which("curl")} --fail-with-body "$@"
"""
MAKE: Final = f"""\
#!/bin/bash
exec {shutil.which("make")} --no-print-directory -C {ROOT} -o install "PORT=$PORT" "BIN=$SHIMS" "$@"
"""
"""Creates what a make target creates once everything is installed."""


class Starter:
    """Forks each `triolet` that the shell asks for.

    Args:
      path: path of the socket for requests.
      defaults: options added to a command unless it has the first of them or queries a server: what
        the documents leave open, but two fleets on one machine cannot share.
    """

    def __init__(self, path: Path, defaults: Mapping[str, tuple[str, ...]]) -> None:
        self._defaults = defaults
        self._forking = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(path))
        self._listening.listen()
        self._started: list[tuple[int, Future[int]]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more requests, and kill what still runs."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for pid, ended in self._running():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            ended.result(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Stop what runs, as a service manager does; fail if it reports an error."""
        for pid, ended in reversed(self._running()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            assert ended.result(STOP_TIMEOUT_S) == 0, "a stopped process ends with exit code 0"

    def _running(self) -> list[tuple[int, Future[int]]]:
        return [one for one in self._started if not one[1].done()]

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                asking = self._listening.accept()[0]
                threading.Thread(target=self._start, args=(asking,), daemon=True).start()

    def _start(self, asking: socket.socket) -> None:
        with asking:
            message, fds, _, _ = socket.recv_fds(asking, MAX_REQUEST_BYTES, 3)
            cwd, environment, *arguments = json.loads(message)
            default = self._defaults.get(arguments[0], ())
            if not {"--ledger", *default[:1]} & set(arguments):
                arguments += default
            ended: Future[int] = Future()
            with self._forking:
                process = forked.Popen(
                    [forked.TRIOLET, *arguments],
                    cwd=cwd,
                    env=environment,
                    stdin=fds[0],
                    stdout=fds[1],
                    stderr=fds[2],
                )
                self._started.append((process.pid, ended))
            for fd in fds:
                os.close(fd)
            ended.set_result(process.wait())
            with suppress(BrokenPipeError):  # the asking shell has been killed
                asking.send(str(ended.result()).encode())


class Reader:
    """A shell in an empty folder, with its own home and port.

    Args:
      folder: an empty folder with a short name.

    Attributes:
      substitutes: names in the documents and what they are called on this machine.
      stack: resources closed at the end.
      said: output of the last command.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        shims = folder / "shims"
        folders = (
            *("home", "shims", "typed", "run", "tmp"),
            *("srv", "var/lib/triolet", "mnt/elsewhere"),
        )
        for made in folders:
            (folder / made).mkdir(mode=0o700, parents=True)
        for name, program in (("triolet", TRIOLET), ("curl", CURL), ("make", MAKE)):
            (shims / name).write_text(program)
            (shims / name).chmod(0o700)
        self.stack = ExitStack()
        # Kept open to the end, so that no other process gets the ports.
        kept = [self.stack.enter_context(bind_port("127.0.0.1", 0)) for _ in range(2)]
        port, spare = (one.getsockname()[1] for one in kept)
        self.url = f"http://127.0.0.1:{port}"
        self.substitutes = {
            **{"8000": str(port), "9000": str(port), "8001": str(spare)},
            **{f"10.0.0.{n}": f"127.{port >> 8}.{port & 255}.{n}" for n in (5, 6)},
            **{" MODEL ": " demo ", "/models/llama": "demo", '"cuda"': '"cpu"'},
            **{"/opt/triolet/bin/": "", "/run/user/1000": str(folder / "run")},
            **{name: f"{folder}{name}" for name in ("/srv/", "/var/lib/", "/mnt/elsewhere/")},
        }
        self._starter = Starter(
            folder / "starter",
            {
                "serve": ("--port", str(port)),
                "doctor": ("--port", str(spare)),
                "chat": ("--url", self.url),
                "server": (f"--set=server.port={spare}",),
            },
        )
        self._typed = 0
        self.said = ""
        self._shell = subprocess.Popen(
            ["bash", "--norc", "-o", "pipefail", "-s"],
            stdin=subprocess.PIPE,
            cwd=folder,
            env={
                "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(self.home),
                "SSL_CERT_DIR": os.environ.get("SSL_CERT_DIR", ""),
                "XDG_RUNTIME_DIR": str(folder / "run"),
                "TMPDIR": str(folder / "tmp"),
                "STARTER": str(folder / "starter"),
                "PYTHON": sys.executable,
                "PORT": str(port),
                "SHIMS": str(shims),
            },
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        """Kill all that was started."""
        self._starter.close()
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()
        self.stack.close()

    def stop(self) -> None:
        """Stop the foreground process."""
        self._starter.stop()

    def here(self, text: str) -> str:
        """Return a text of the documents with this machine's names."""
        for name, ours in self.substitutes.items():
            text = text.replace(name, ours)
        return text

    def read(self, one: Shown) -> str:
        """Run what a document shows; return the failure, or an empty text."""
        text = self.here(one.text)
        if BEGINS.match(text):
            self.stop()
        if one.is_python:
            program = self.folder / "program.py"
            program.write_text(text)
            text = f"$PYTHON {program}"
        return self.type(text)

    def type(self, command: str) -> str:
        """Type a command; return the failure, or an empty text. For a foreground process, wait
        until it is ready."""
        self._typed += 1
        out, err, end = (self.folder / "typed" / f"{self._typed}.{part}" for part in PARTS)
        stays = FOREGROUND.match(command)
        assert self._shell.stdin is not None
        done = f"echo $? >{end}.new; mv {end}.new {end}"
        whole = f"{{ {command}\n}} >{out} 2>{err} </dev/null; {done}"
        self._shell.stdin.write(f"{{ {whole}; }} &\n" if stays else f"{whole}\n")
        self._shell.stdin.flush()
        give_up = time.monotonic() + COMMAND_TIMEOUT_S
        while not end.exists():
            if stays and self._is_ready(out):
                return ""
            if time.monotonic() > give_up:
                break
            time.sleep(POLL_S)
        code = end.read_text().strip() if end.exists() else "none in time"
        if code == "0" and not stays:
            self.said = out.read_text() + err.read_text()
            return ""
        return f"exit code {code}: {out.read_text()[-SHOWN:]}{err.read_text()[-SHOWN:]}"

    def _is_ready(self, out: Path) -> bool:
        said = out.read_text() if out.exists() else ""
        if BEGUN in said:
            return True
        if found := URL.search(said):
            with suppress(httpx2.TransportError):
                return httpx2.get(f"{found[1]}/health/ready", timeout=ANSWER_S).is_success
        return False
