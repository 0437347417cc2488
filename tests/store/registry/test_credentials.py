"""Tests of credentials for registries: where they come from, and how a real registry asks for
them."""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

import pytest

from ops.cli import main
from store.registry.credentials import credentials_for
from triolet.errors import ConfigError

from .conftest import digest_in
from .docker_registry import HTPASSWD, PASSWORD, running_registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from store.layout import ModelStore

HOST: Final = "registry.example:5000"


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """This user's Docker folder."""
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker"


def stored(docker: Path, **config: object) -> None:
    (docker / "config.json").write_text(json.dumps(config))


def auth(text: bytes) -> dict[str, str]:
    return {"auth": base64.b64encode(text).decode()}


@pytest.mark.slow
def test_a_real_registry_lets_in_who_has_the_password(
    tmp_path: Path,
    source: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    needed = f"auth: {{htpasswd: {{realm: x, path: {tmp_path / 'htpasswd'}}}}}\n"
    with running_registry(tmp_path / "registry", needed) as own:
        push = ("model", "push", "chat:v1", f"oci://{own.host}/chat:v1")
        where = ("--store", str(source.root))
        assert main((*push, *where)) == 1
        err = capsys.readouterr().err
        assert f"{own.host}/chat: manifest v1 is refused with status 401 (UNAUTHORIZED: " in err
        assert "no credentials were given: set TRIOLET_REGISTRY_USERNAME and" in err
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"wrong\n")))
        assert main((*push, *where, "--username", "alice")) == 1
        err = capsys.readouterr().err
        assert "asked as alice with the password from standard input: check that both" in err
        assert "wrong" not in err
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{PASSWORD}\n".encode())))
        assert main((*push, *where, "--username", "alice")) == 0
        monkeypatch.setenv("TRIOLET_REGISTRY_USERNAME", "alice")
        monkeypatch.setenv("TRIOLET_REGISTRY_PASSWORD", PASSWORD)
        assert main(("model", "pull", push[-1], "--store", str(tmp_path / "store"))) == 0
        assert digest_in(source) in capsys.readouterr().out


@contextmanager
def token_service(tokens: list[str]) -> Iterator[str]:
    """Issue tokens as cloud registries do, and record the requests."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            tokens.append(f"{self.headers.get('authorization')} {self.path}")
            content = json.dumps({"token": f"t{len(tokens)}"}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/token"
        finally:
            server.shutdown()
            thread.join()


def test_a_real_registry_that_wants_a_token_sends_to_a_service(
    tmp_path: Path, source: ModelStore, docker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens: list[str] = []
    with token_service(tokens) as realm:
        silly = f"auth: {{silly: {{realm: '{realm}', service: here}}}}\n"
        with running_registry(tmp_path / "registry", silly) as own:
            stored(docker, auths={own.host: auth(b"alice:secret")})
            location = f"oci://{own.host}/a/chat:v1"
            assert main(("model", "push", "chat:v1", location, "--store", str(source.root))) == 0
    basic = base64.b64encode(b"alice:secret").decode()
    assert tokens[0].startswith(f"Basic {basic} /token?service=here&scope=repository%3Aa%2Fchat")


def test_what_docker_has_stored_is_taken(docker: Path) -> None:
    assert credentials_for(HOST, None, None) is None
    stored(docker, auths={HOST: auth(b"alice:a:b\0"), "x": {}})
    found = credentials_for(HOST, None, None)
    assert found is not None
    assert (found.username, found.password) == ("alice", "a:b")
    assert "a:b" not in repr(found)
    assert credentials_for("x", None, None) is None
    stored(docker, auths={f"https://{HOST}": auth(b"bob:c")})
    assert (found := credentials_for(HOST, None, None)) is not None
    assert found[:2] == ("bob", "c")


def test_a_helper_of_docker_is_asked(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = docker / "docker-credential-test"
    answer = '{"Username":"carol","Secret":"d"}'
    helper.write_text(f"#!/bin/sh\nread host\n[ \"$1 $host\" = 'get {HOST}' ] && echo '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker}:{os.environ['PATH']}")
    stored(docker, credHelpers={HOST: "test"}, auths={HOST: {}})
    assert (found := credentials_for(HOST, None, None)) is not None
    assert found == ("carol", "d", "docker-credential-test")
    assert credentials_for("other.example", None, None) is None
    stored(docker, credsStore="test")
    assert credentials_for("other.example", None, None) is None
    helper.write_text("#!/bin/sh\necho no JSON\n")
    with pytest.raises(ConfigError, match="did not answer with user and password"):
        credentials_for(HOST, None, None)
    for named in ("missing", "../x"):
        stored(docker, credsStore=named)
        with pytest.raises(ConfigError, match=r"correct .*config\.json, or set TRIOLET_REGISTRY"):
            credentials_for(HOST, None, None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "cannot be read"),
        (json.dumps({"auths": {HOST: {"auth": "%%"}}}), "holds a broken `auth` for"),
        (json.dumps({"auths": {HOST: {"auth": "\N{MICRO SIGN}"}}}), "holds a broken `auth` for"),
        (json.dumps({"auths": {HOST: {"auth": "YQ=="}}}), "holds a broken `auth` for"),
        (json.dumps({"auths": {HOST: {"identitytoken": "secret"}}}), "holds an identity token"),
    ],
)
def test_a_broken_file_of_docker_is_named(docker: Path, config: str, words: str) -> None:
    (docker / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=rf"config\.json {words}") as failed:
        credentials_for(HOST, None, None)
    assert "secret" not in str(failed.value)


def test_half_of_what_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="standard input holds no password"):
        credentials_for(HOST, "alice", b"\n")
    monkeypatch.setenv("TRIOLET_REGISTRY_USERNAME", "alice")
    with pytest.raises(ConfigError, match="TRIOLET_REGISTRY_PASSWORD is not set"):
        credentials_for(HOST, None, None)
