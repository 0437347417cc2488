"""Versions from peer to peer: what one shares, what another takes, and lies."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import pytest
from structlog.testing import capture_logs

from ops.cli import main
from ops.registry.shared import SharedModels
from ops.registry.sharing import Place, ShareServer, read_secret
from tests import forked
from triolet.errors import ConfigError
from triolet.store.aliases import Aliases
from triolet.store.layout import ModelStore
from triolet.store.manifest import digest_of
from triolet.store.measured import Golden, Key, Prompt, golden_for, keep_measured
from triolet.store.reference import alias_of, parse_reference
from triolet.store.verify import verify

from .conftest import digest_in
from .lying_registry import Lie
from .test_tls import NAME, write_certificate

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .lying_registry import LyingRegistry

TIMEOUT_S: Final = 60.0
PASSWORD: Final = "open"
GOLDEN: Final = Golden(Key("native", "bfloat16", "a"), (Prompt((1,), (2,)),))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(f"{PASSWORD}\n")
    return path


@pytest.fixture
def peer(source: ModelStore, secret: Path) -> Iterator[str]:
    """A process that shares `chat:v1`; gives its host and port."""
    options = ("--secret", str(secret), "--port", "0", "--store", str(source.root))
    command = [forked.TRIOLET, "model", "share", "chat:v1", *options]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        location = process.stdout.readline().decode().strip()
        yield location.removeprefix("oci://")
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors


@contextmanager
def shared(store: ModelStore, *refs: str, place: Place | None = None) -> Iterator[ShareServer]:
    """Share in a thread of the test."""
    models = SharedModels(store, [parse_reference(one) for one in refs])
    place = place or Place("127.0.0.1", 0, None, None, is_insecure=False)
    with ShareServer(store, models, PASSWORD, place) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def weights_of(store: ModelStore) -> str:
    blobs = store.manifest(digest_in(store)).blobs
    return max(blobs, key=lambda one: one.size).digest


@pytest.mark.slow
def test_a_store_pulls_from_another_one_what_that_shares(
    source: ModelStore,
    store: ModelStore,
    peer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def pull(location: str, password: str) -> int:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{password}\n".encode())))
        where = ("--store", str(store.root), "--username", "peer")
        return main(("model", "pull", f"oci://{peer}/{location}", *where))

    assert pull("chat:v1", "shut") == 1
    assert "the password is missing or wrong" in capsys.readouterr().err
    for location in ("chat:v2", "other:v1", f"chat@sha256:{'0' * 64}"):
        assert pull(location, PASSWORD) == 1
        assert "nothing that is shared here has that name" in capsys.readouterr().err
    assert store.entries() == ()
    assert pull("chat:v1", PASSWORD) == 0
    assert capsys.readouterr().out.strip() == digest_in(source) == digest_in(store)
    assert verify(store, store.entries()).faults == []


LIES: Final[dict[str, tuple[Callable[[bytes], Lie], str]]] = {
    "wrong bytes": (lambda right: Lie(200, right[::-1]), "has the digest sha256:"),
    "no end": (lambda right: Lie(200, right * 2), "is longer"),
    "cut": (
        lambda right: Lie(200, right[:1000], {"content-length": str(len(right))}),
        "1000 of .* are kept",
    ),
    "nothing": (lambda _: Lie(404), "is refused with status 404"),
    "another range": (
        lambda right: Lie(206, right[7:], {"content-range": f"bytes 7-{len(right) - 1}/*"}),
        "",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_is_named_and_the_next_one_asked(
    store: ModelStore,
    liar: LyingRegistry,
    peer: str,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
    lie: str,
) -> None:
    weights = weights_of(liar.store)
    answer, words = LIES[lie]
    told = answer(liar.store.blob_path(weights).read_bytes())
    # Once cut it says nothing more, so that the next peer goes on in the middle.
    liar.lie(f"/blobs/{weights}", lambda asked: Lie(404) if "range" in asked.headers else told)
    if lie == "cut":
        words = "is refused with status 404"
    peers = ("--peer", liar.host, "--peer", f"oci://{peer}", "--peer-secret", str(secret))
    pull = ("model", "pull", f"oci://{peer}/chat:v1", "--username", "peer")
    before = len(liar.asked)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{PASSWORD}\n".encode())))
        assert main((*pull, *peers, "--store", str(store.root))) == 0
    err = capsys.readouterr().err
    assert re.search(rf"{liar.host}/chat: .*{words}.*that peer is asked for nothing more", err), err
    assert err.count("that peer is asked for nothing more") == 1
    assert len(liar.asked) > before
    assert digest_in(store) == liar.digest
    assert verify(store, store.entries()).faults == []
    assert list((store.root / "partial").glob("*.part")) == []


def test_a_peer_that_is_gone_or_knows_no_password_is_passed_over(
    store: ModelStore, liar: LyingRegistry, peer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    pull = ("model", "pull", liar.location, "--store", str(store.root))
    assert main((*pull, "--peer", gone, "--peer", peer)) == 0
    err = capsys.readouterr().err
    assert f"{gone}/chat: the connection for " in err
    assert f"{peer}/chat: " in err
    assert "the password is missing or wrong" in err
    assert main((*pull, "--peer", "a/b")) == 2
    assert "'a/b' names no peer; allowed: HOST or HOST:PORT" in capsys.readouterr().err


def ask(
    server: ShareServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Ask as a peer with the password does."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=TIMEOUT_S)  # type: ignore[arg-type]
    shown = base64.b64encode(f"peer:{PASSWORD}".encode()).decode()
    connection.request(
        method, path, headers={"host": "peer", "authorization": f"Basic {shown}", **headers}
    )
    answer = connection.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_ranges_of_blobs_are_served(source: ModelStore) -> None:
    weights = weights_of(source)
    content = source.blob_path(weights).read_bytes()
    with shared(source, "chat:v1") as server:
        path = f"/v2/chat/blobs/{weights}"
        status, headers, found = ask(server, path)
        assert (status, found, headers["docker-content-digest"]) == (200, content, weights)
        assert ask(server, path, "HEAD")[1]["content-length"] == str(len(content))
        assert ask(server, path, "HEAD")[2] == b""
        status, headers, found = ask(server, path, range="bytes=100-")
        assert (status, found) == (206, content[100:])
        assert headers["content-range"] == f"bytes 100-{len(content) - 1}/{len(content)}"
        assert ask(server, path, range="bytes=5-9")[2] == content[5:10]
        assert ask(server, path, range=f"bytes=5-{10**17}")[2] == content[5:]
        status, headers, _ = ask(server, path, range=f"bytes={len(content)}-")
        assert (status, headers["content-range"]) == (416, f"bytes */{len(content)}")
        for strange in ("bytes=-5", "bytes=5-4x", "lines=1-2", f"bytes={'9' * 5000}-"):
            assert ask(server, path, range=strange)[0] == 200, "what is no range is not heeded"


def test_nothing_but_what_is_named_is_served(store: ModelStore, source: ModelStore) -> None:
    with shared(source, "chat") as server:
        pulled_as_peer(store, server)
    digest = digest_in(store)
    with store.writing() as writer:
        keep_measured(writer, digest, [GOLDEN])
        stray = writer.put(b"of no version")
    aliases = Aliases(store)
    with shared(store, "chat@stable") as server:
        assert ask(server, f"/v2/chat/manifests/{digest}")[0] == 404, "no alias names it"
        aliases.move(alias_of("chat", "stable"), digest)
        for what in (digest, "stable"):
            assert digest_of(ask(server, f"/v2/chat/manifests/{what}")[2]) == digest
        assert ask(server, "/v2/chat/manifests/v1")[0] == 404, "that tag is not shared"
        path = f"/v2/chat/referrers/{digest}"
        (row,) = json.loads(ask(server, path)[2])["manifests"]
        assert json.loads(ask(server, f"{path}?artifactType=other")[2])["manifests"] == []
        manifest = json.loads(ask(server, f"/v2/chat/manifests/{row['digest']}")[2])
        layer = manifest["layers"][0]["digest"]
        assert json.loads(ask(server, f"/v2/chat/blobs/{layer}")[2])["key"]["arithmetic"] == "a"
        for path in (
            f"/v2/chat/blobs/{stray}",
            f"/v2/chat/blobs/{digest}",
            f"/v2/other/manifests/{digest}",
            "/v2/chat/blobs/../../../index.json",
            "/v2/chat/blobs/%2e%2e%2findex.json",
            f"/v2/chat/blobs/{weights_of(store)}/../{stray}",
            f"/v2/chat/blobs/{weights_of(store).upper()}",
            "/v2/../v2/chat/manifests/v1",
            "//etc/passwd",
            "oci://[/v2/",
            "/",
        ):
            assert ask(server, path)[0] == 404, path
        assert ask(server, "/v2/")[0] == 200
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert ask(server, f"/v2/chat/manifests/{digest}", method)[0] == 501
        path = f"/v2/chat/manifests/{digest}"
        for wrong in ("", "Basic", "Basic !", "Bearer open", "Basic cGVlcjpzaHV0"):
            assert ask(server, path, authorization=wrong)[0] == 401
        headers = ask(server, path, authorization="")[1]
        assert headers["www-authenticate"] == 'Basic realm="triolet"'
        aliases.remove(alias_of("chat", "stable"))
        assert ask(server, path)[0] == 404, "it was taken back"


def pulled_as_peer(store: ModelStore, server: ShareServer) -> None:
    """Pull `chat:v1` with the password."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRIOLET_REGISTRY_USERNAME", "peer")
        patched.setenv("TRIOLET_REGISTRY_PASSWORD", PASSWORD)
        location = f"{server.location}/chat:v1"
        assert main(("model", "pull", location, "--store", str(store.root))) == 0


def test_what_is_known_of_a_version_comes_with_it(
    source: ModelStore, store: ModelStore, tmp_path: Path
) -> None:
    with shared(source, "chat") as server:
        pulled_as_peer(store, server)
    digest, third = digest_in(store), ModelStore(tmp_path / "third")
    with store.writing() as writer:
        keep_measured(writer, digest, [GOLDEN])
    with shared(store, "chat") as server:
        pulled_as_peer(third, server)
    assert golden_for(third.root, digest, GOLDEN.key) is not None


def test_a_damaged_blob_is_not_served(source: ModelStore, store: ModelStore) -> None:
    with shared(source, "chat") as server:
        pulled_as_peer(store, server)
    weights = weights_of(store)
    path = store.blob_path(weights)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"x")
    with shared(store, "chat") as server:
        status, _, content = ask(server, f"/v2/chat/blobs/{weights}")
    assert status == 500
    assert b"its log says how" in content
    assert str(path).encode() not in content


def test_connections_are_bounded_in_number_and_time(
    source: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.registry.sharing.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("ops.registry.sharing.REQUEST_S", 3600.0)
    with shared(source, "chat") as server:
        address = ("127.0.0.1", int(server.server_address[1]))
        held = [socket.create_connection(address, TIMEOUT_S) for _ in range(2)]
        with socket.create_connection(address, TIMEOUT_S) as third:
            assert third.recv(1) == b"", "it is closed at once"
        for connection in held:
            connection.sendall(b"GET /v2/ HTTP/1.1\r\n")  # and never the rest
            connection.close()
    monkeypatch.setattr("ops.registry.sharing.REQUEST_S", 0.05)
    with (
        shared(source, "chat") as server,
        socket.create_connection(("127.0.0.1", int(server.server_address[1])), TIMEOUT_S) as slow,
    ):
        slow.sendall(b"GET /v2/ HTTP/1.1\r\nx-a: ")
        assert slow.recv(1) == b"", "a request that never ends is cut"


def test_nobody_keeps_a_connection_without_the_password(source: ModelStore) -> None:
    with shared(source, "chat") as server:
        address = ("127.0.0.1", int(server.server_address[1]))
        shown = base64.b64encode(f"peer:{PASSWORD}".encode())
        lines = b"GET /v2/ HTTP/1.1\r\nhost: a\r\n"
        with socket.create_connection(address, TIMEOUT_S) as raw:
            raw.sendall((lines + b"\r\n") * 2)
            answer = b"".join(iter(lambda: raw.recv(65_536), b""))
        assert answer.count(b"HTTP/1.1 401 ") == 1
        with socket.create_connection(address, TIMEOUT_S) as raw:
            raw.sendall((lines + b"authorization: Basic " + shown + b"\r\n\r\n") * 2 + lines)
            raw.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: raw.recv(65_536), b""))
        assert answer.count(b"HTTP/1.1 200 ") == 2


def test_lines_about_peers_without_the_password_are_bounded(
    source: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.registry.sharing.STRANGER_LINES", 2)
    monkeypatch.setattr("ops.registry.sharing.STRANGER_LINES_S", 3600.0)

    def refused(server: ShareServer) -> None:
        address = ("127.0.0.1", int(server.server_address[1]))
        with socket.create_connection(address, TIMEOUT_S) as raw, suppress(OSError):
            raw.sendall(b"GET /v2/ HTTP/1.1\r\n\r\n")
            raw.shutdown(socket.SHUT_WR)  # an error where it has no room
            while raw.recv(65_536):
                pass

    with shared(source, "chat") as server, capture_logs() as logs:
        for _ in range(9):
            refused(server)
        assert [one["status"] for one in logs] == [401, 401]
        assert ask(server, "/v2/")[0] == 200
        assert logs[-1]["status"] == 200, "with the password every request has its line"
        assert ask(server, "/v2/none/manifests/latest")[0] == 404
        assert logs[-1]["status"] == 404, "also one that is refused"
        monkeypatch.setattr("ops.registry.sharing.STRANGER_LINES", 99)
        refused(server)
        assert logs[-1]["left_out"] == 7
    monkeypatch.setattr("ops.registry.sharing.MAX_CONNECTIONS", 0)
    monkeypatch.setattr("ops.registry.sharing.STRANGER_LINES", 2)
    with shared(source, "chat") as server, capture_logs() as logs:
        for _ in range(9):
            refused(server)
        assert [one["event"] for one in logs] == ["share_full"] * 2


def test_a_connection_that_is_cut_keeps_its_tls(
    source: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `SSLSocket.shutdown` takes it away: a thread that sends meanwhile would send plain bytes.
    write_certificate(tmp_path)
    place = Place("127.0.0.1", 0, tmp_path / "ca.pem", tmp_path / "key.pem", is_insecure=False)
    taken: list[int] = []

    def note(self: ssl.SSLSocket, how: int) -> None:
        taken.append(how)
        socket.socket.shutdown(self, how)

    monkeypatch.setattr("ssl.SSLSocket.shutdown", note)
    monkeypatch.setattr("ops.registry.sharing.REQUEST_S", 0.05)
    with (
        shared(source, "chat", place=place) as server,
        socket.create_connection(("127.0.0.1", int(server.server_address[1])), TIMEOUT_S) as slow,
    ):
        assert slow.recv(1) == b"", "no handshake comes, and it is cut"
    assert socket.SHUT_RDWR not in taken


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x00\xff\r\n\r\n", b"400"),
        (b"GET /v2/ HTTP/9.9\r\n\r\n", b"505"),
        (b"GET /" + b"a" * (65_537 - 5), b"414"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\ncontent-length: 9\r\n\r\nGET / HTTP/1.1\r\n\r\n", b"401"),
    ],
)
def test_what_is_no_request_is_refused_once(
    source: ModelStore, capsys: pytest.CaptureFixture[str], sent: bytes, status: bytes
) -> None:
    with (
        shared(source, "chat") as server,
        socket.create_connection(("127.0.0.1", int(server.server_address[1])), TIMEOUT_S) as raw,
    ):
        raw.sendall(sent)
        answer = b"".join(iter(lambda: raw.recv(65_536), b""))
    assert status in answer[:500]
    assert answer.count(b"HTTP/1.1 ") <= 1
    said = capsys.readouterr()
    assert "share_note" in said.out + said.err or status == b"401"
    assert "share_failed" not in said.out + said.err


def test_a_secret_is_made_for_this_user_and_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    made = read_secret(path)
    assert len(made) == 64
    assert read_secret(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"mode 0640, .*`chmod 600 {path}`"):
        read_secret(path)
    path.chmod(0o600)
    for content in (b"", b"\n", "gehe\u00eem".encode(), b"a\x07b"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="holds no password"):
            read_secret(path)


def test_beyond_this_machine_tls_is_needed(
    source: ModelStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place("0.0.0.0", 0, None, None, is_insecure=False)
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 is beyond this machine"):
        ShareServer(source, SharedModels(source, ()), PASSWORD, place)
    wrong = place._replace(certificate=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"--certificate .*none\.pem and its key cannot be used"):
        ShareServer(source, SharedModels(source, ()), PASSWORD, wrong)
    write_certificate(tmp_path)
    certified = Place("127.0.0.1", 0, tmp_path / "ca.pem", tmp_path / "key.pem", is_insecure=False)
    resolve = socket.getaddrinfo
    known = lambda host, *more, **others: resolve(  # noqa: E731
        "127.0.0.1" if host == NAME else host, *more, **others
    )
    monkeypatch.setattr("socket.getaddrinfo", known)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("TRIOLET_REGISTRY_USERNAME", "peer")
    monkeypatch.setenv("TRIOLET_REGISTRY_PASSWORD", PASSWORD)
    with shared(source, "chat", place=certified) as server:
        address = ("127.0.0.1", int(server.server_address[1]))
        with socket.create_connection(address, TIMEOUT_S):
            # One that never shakes hands holds up no other one.
            location = f"oci://{NAME}:{address[1]}/chat:v1"
            store = tmp_path / "store"
            assert main(("model", "pull", location, "--store", str(store))) == 0
    assert digest_in(ModelStore(store)) == digest_in(source)
