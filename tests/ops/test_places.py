"""Tests of ports, the socket directory, model directories and the doctor's checks of them."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar

import pytest

from engine.model_config import load_model_config
from ops import port_holder
from ops.cli.check_machine import Finding, FindingStatus, package_problem
from ops.cli.check_places import check_links, check_port
from ops.models.model_directory import check_text, demo_model_path, find_model
from ops.ports import base_url, claim_port, free_port
from ops.private_directory import LOCK, PREFIX, parent_directory, private_directory
from ops.running_fleets import Note, write_note
from tests.threaded import running_server
from triolet.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as holder:
        # Bound but not listening: the port is in use, and connections are refused at once.
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", r"port {port} on 127\.0\.0\.1 is in use.*--port"),
        # A name with two addresses means the one that the server binds.
        ("localhost", "port {port} on localhost is in use"),
        ("192.0.2.1", "not an address of this machine"),
    ],
)
def test_a_place_that_cannot_be_bound_is_named(busy_port: int, host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.format(port=busy_port)):
        claim_port(host, busy_port)


def test_port_0_becomes_a_free_one() -> None:
    port = claim_port("127.0.0.1", 0)
    assert claim_port("127.0.0.1", port) == port


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("gpu-1", "http://gpu-1:8000"),
    ],
)
def test_the_url_is_one_that_this_machine_can_open(host: str, url: str) -> None:
    assert base_url(host, 8000) == url


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory with a path short enough for sockets, unlike pytest's."""
    with TemporaryDirectory(dir="/tmp", prefix="t") as path:
        yield Path(path)


def test_the_directory_is_private_and_gone_afterwards(parent: Path) -> None:
    with private_directory(parent) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "decode-0.kv").touch()
    assert list(parent.iterdir()) == []


def test_an_abandoned_directory_is_removed_and_a_used_one_kept(parent: Path) -> None:
    abandoned = parent / f"{PREFIX}killed"
    abandoned.mkdir(mode=0o700)
    (abandoned / LOCK).touch()
    with private_directory(parent) as used, private_directory(parent) as other:
        assert used.exists()
        assert other.exists()
        assert not abandoned.exists()


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    with pytest.raises(ConfigError, match="too long for sockets; set TMPDIR"):
        private_directory(long).__enter__()
    assert list(long.iterdir()) == []


def test_a_parent_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set TMPDIR"):
        private_directory(tmp_path / "missing").__enter__()


def test_the_runtime_directory_is_used_only_if_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/self/fd" * 9)
    assert parent_directory() != Path("/proc/self/fd" * 9)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert parent_directory() == Path("/tmp")


def safetensors(num_bytes: int) -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]},
    }
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(num_bytes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a model."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(64))
    return folder


def test_a_whole_model_is_found(model: Path) -> None:
    assert find_model(model) == model


def test_without_a_name_it_is_the_demo_model() -> None:
    assert find_model(None) == demo_model_path()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"\xff", "config.json is not valid JSON"),
        ("config.json", b"[]", "holds JSON that is not an object"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("model.safetensors", None, "no .safetensors file"),
    ],
)
def test_an_incomplete_directory_is_refused_with_a_remedy(
    model: Path, file: str, content: bytes | None, words: str
) -> None:
    (model / file).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_bytes(content)
    with pytest.raises(ModelError, match=r"download it again|save the tokenizer") as caught:
        load_model_config(model) if file == "config.json" else check_text(find_model(model))
    assert words in str(caught.value)


def test_a_hub_name_gets_the_command_that_downloads_it() -> None:
    with pytest.raises(ModelError, match="hf download a/b --local-dir b"):
        find_model(Path("a/b"))


def test_a_busy_port_is_a_failure_and_a_free_one_is_not(busy_port: int) -> None:
    finding, free = check_port("127.0.0.1", busy_port)
    assert finding.status is FindingStatus.FAIL
    assert f"port {busy_port} on 127.0.0.1 is in use by another program" in finding.detail
    assert f"triolet serve --port {free}" in finding.remedy
    assert check_port("127.0.0.1", free) == (Finding(f"Port {free}", OK, FREE), free)


OK, FREE = FindingStatus.OK, "free on 127.0.0.1"


def two_ports_in_a_row() -> tuple[socket.socket, socket.socket]:
    while True:
        holder, neighbour = socket.socket(), socket.socket()
        holder.bind(("127.0.0.1", 0))
        try:
            neighbour.bind(("127.0.0.1", holder.getsockname()[1] + 1))
        except (OSError, OverflowError):
            holder.close()
            neighbour.close()
        else:
            return holder, neighbour


def test_the_next_port_is_proposed_only_if_it_is_free() -> None:
    holder, neighbour = two_ports_in_a_row()
    with holder, neighbour:
        port = holder.getsockname()[1]
        free = free_port("127.0.0.1", port)
        assert free not in (port, port + 1)
        assert claim_port("127.0.0.1", free) == free


class Triolet(BaseHTTPRequestHandler):
    """A server with tenants and two models. Its probes need no key."""

    refusal = ""

    def do_GET(self) -> None:
        status, body = 401, {"error": {"message": "this server asks for an API key"}}
        if self.path == "/health/live":
            status, body = 200, {"status": "live", "model": "chat", "version": "7.8"}
        elif self.path == "/health/ready":
            models = [{"name": "chat"}, {"name": "code"}]
            status, body = 200, {"status": "ready", "model": "chat", "models": models}
            if self.refusal:
                status, body = 503, {"error": {"message": self.refusal}}
        self.asked.append(str(self.headers.get("authorization")))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    asked: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Unready(Triolet):
    """The same server, refused by its worker."""

    refusal = (
        "no live worker for decode; decode at tcp://10.0.0.5:7001 refused our key abcdefgh…: copy "
        "/etc/triolet/keys/key.public into authorized/ of the key directory there"
    )


class Other(BaseHTTPRequestHandler):
    """Another program that speaks HTTP."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'["live"]')

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Dripping(Other):
    """Another program, which sends its response head byte by byte until the client disconnects."""

    def do_GET(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\nx: ")
        with suppress(OSError):
            while not select([self.connection], [], [], 0.01)[0]:
                self.wfile.write(b"x")


@contextmanager
def on_a_port(program: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with running_server(HTTPServer(("127.0.0.1", 0), program)) as server:
        yield server.server_port


def test_doctor_and_serve_name_the_triolet_that_has_the_port(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    monkeypatch.setenv("TRIOLET_API_KEY", "sk-secret")
    Triolet.asked.clear()
    with on_a_port(Triolet) as port, private_directory(parent) as directory:
        write_note(directory, Note(port, base_url("127.0.0.1", port), {}, ("chat", "code"), 4711))
        who = f"Triolet 7.8, serving chat, code (pid 4711, {directory})"
        finding, free = check_port("127.0.0.1", port)
        assert finding.status is FindingStatus.WARN
        assert finding.detail == f"port {port} on 127.0.0.1 is in use by {who} and is ready"
        assert f"port {free} is free" in finding.remedy
        assert claim_port("127.0.0.1", free) == free
        with pytest.raises(ConfigError) as refused:
            claim_port("127.0.0.1", port)
    assert str(refused.value) == (
        f"port {port} on 127.0.0.1 is in use by {who}; stop it, or choose a free port: "
        f"triolet serve --port {free}"
    )
    assert set(Triolet.asked) == {"None"}, "what has the port need not be a Triolet"


def test_a_fleet_that_starts_is_known_before_its_server_answers(
    parent: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    with private_directory(parent) as directory:
        write_note(directory, Note(busy_port, "", {}, ("chat",), 4711))
        finding, _ = check_port("127.0.0.1", busy_port)
    assert finding.status is FindingStatus.WARN
    assert f"Triolet, serving chat (pid 4711, {directory}) and is not ready" in finding.detail


def test_another_program_that_speaks_http_is_no_triolet() -> None:
    with on_a_port(Other) as port:
        finding, free = check_port("127.0.0.1", port)
    assert finding.detail == f"port {port} on 127.0.0.1 is in use by another program"
    assert (finding.status, f"--port {free}" in finding.remedy) == (FindingStatus.FAIL, True)


def test_a_program_that_never_ends_its_answer_is_no_triolet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_holder, "TIMEOUT_S", 0.1)
    with on_a_port(Dripping) as port:
        finding, _ = check_port("127.0.0.1", port)
    assert finding.detail == f"port {port} on 127.0.0.1 is in use by another program"


def test_a_server_that_is_not_ready_says_which_worker_refused_it_and_what_to_do() -> None:
    with on_a_port(Unready) as port:
        finding, _ = check_port("127.0.0.1", port)
    assert finding.status is FindingStatus.WARN
    assert finding.detail.endswith(f"Triolet 7.8, serving chat and is not ready: {Unready.refusal}")


@pytest.mark.slow
def test_sockets_and_zeromq_work_here(parent: Path) -> None:
    assert [finding.status for finding in check_links(parent)] == [
        FindingStatus.OK,
        FindingStatus.OK,
    ]


def test_a_place_without_room_for_sockets_is_a_failure(tmp_path: Path) -> None:
    (finding,) = check_links(tmp_path / "missing")
    assert finding.status is FindingStatus.FAIL
    assert "TMPDIR" in finding.remedy


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("trio==0.35.0", None),
        ("trio==0.34.0", "trio is 0.35.0, wanted ==0.34.0"),
        ("torch>=2.11", None),
        ("torch>=2.14", "torch is 2.13.0+cpu, wanted >=2.14"),
        ("numpy>=2", "numpy is missing"),
        ("jinja2[extra]>=3.1.6", None),
        ("odd !! thing", "requirement 'odd !! thing' has an unknown form"),
    ],
)
def test_packages_are_compared_with_what_is_asked_for(
    requirement: str, problem: str | None
) -> None:
    from importlib.metadata import PackageNotFoundError

    def version(name: str) -> str:
        if name == "numpy":
            raise PackageNotFoundError(name)
        return {"trio": "0.35.0", "torch": "2.13.0+cpu", "jinja2": "3.10.0"}[name]

    assert package_problem(requirement, version) == problem


def test_findings_are_plain_rows() -> None:
    assert Finding("CPU", FindingStatus.OK, "2 cores")._asdict() == {
        "subject": "CPU",
        "status": "ok",
        "detail": "2 cores",
        "remedy": "",
    }
