"""Tests of `server.hosts` settings, the shared secret, and connections over TLS."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from server.peers.host_secret import HostSecret, read_host_secret
from server.peers.other_hosts import OtherHosts
from tests.server.support.surface import CONFIG, PATIENCE_S
from triolet.config import HostsConfig, QuotaConfig, TenantsConfig
from triolet.errors import ConfigError, SettingError
from triolet.private_files import FILE_MODE

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "s" * 32
QUOTAS = TenantsConfig(quotas=QuotaConfig(limits="redis://127.0.0.1:1"))
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


def hosts_of(folder: Path, **more: object) -> OtherHosts:
    secret = folder / "secret"
    secret.write_text(SECRET)
    values = {"advertised_url": "https://a.example", "secret_file": str(secret), "timeout_s": 30}
    hosts = HostsConfig(**values | more)  # type: ignore[arg-type]
    return OtherHosts(replace(CONFIG, hosts=hosts, tenants=QUOTAS))


@pytest.mark.parametrize(
    ("url", "is_allowed", "with_http"),
    [
        ("https://a.example", True, True),
        ("https://a.example:8443", True, True),
        ("https://[2001:db8::1]:8443", True, True),
        ("http://127.0.0.2:8000", False, True),
        ("http://a.example", False, True),
        ("https://a.example/", False, False),
        ("https://a.example/v1", False, False),
        ("https://a.example?x", False, False),
        ("https://user:password@a.example", False, False),
        ("https://a.example:0", False, False),
        ("https://a.example:99999", False, False),
        ("https://a.example\n", False, False),
        ("https://", False, False),
        ("redis://a.example", False, False),
        ("", False, False),
    ],
)
def test_a_url_names_a_host_and_http_needs_permission(
    url: str, is_allowed: bool, with_http: bool
) -> None:
    assert HostsConfig().may_reach(url) is is_allowed
    assert HostsConfig(allow_http=True).may_reach(url) is with_http


def test_plain_http_to_this_machine_is_for_hosts_that_are_reached_in_the_same_way() -> None:
    config = HostsConfig("http://127.0.0.1:8000", "secret")
    assert config.may_reach("http://127.0.0.2:8000")
    assert not config.may_reach("http://a.example")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"advertised_url": "a", "secret_file": "s"}, "advertised_url is 'a'"),
        ({"advertised_url": "https://a.example"}, "secret_file is needed"),
        ({"renew_s": 3.0, "lease_s": 3.0}, "renew_s is 3.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        HostsConfig(**values)  # type: ignore[arg-type]


def test_hosts_need_a_redis() -> None:
    hosts = HostsConfig("https://a.example", "secret")
    with pytest.raises(SettingError, match="give --limits redis://"):
        replace(CONFIG, hosts=hosts)


def test_the_secret_is_made_private_and_compared_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o644)
    secret = read_host_secret(str(file))
    assert file.stat().st_mode & 0o777 == FILE_MODE
    assert secret.matches(SECRET)
    for other in ("", SECRET[1:], f"{SECRET} ", "é"):
        assert not secret.matches(other)
    assert secret.is_in([(b"host", b"h"), (b"x-triolet-host-secret", SECRET.encode())])
    assert not secret.is_in([(b"host", SECRET.encode()), (b"x-triolet-host-secret", b"\xff")])


@pytest.mark.parametrize("content", [b"short", b"", b"\xff" * 40, b"two lines\n" * 8])
def test_what_is_no_secret_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="secret_file") as refused:
        read_host_secret(str(file))
    assert "two lines" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_host_secret(str(tmp_path / "none"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_a_host_is_reached_over_tls_if_its_authority_is_known(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    heard: list[bytes] = []

    async def answer(stream: trio.SocketStream) -> None:
        secure = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            heard.append(bytes(await secure.receive_some()))
            await secure.send_all(ANSWER)
        except trio.BrokenResourceError:
            heard.append(b"")

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            listen = trio.serve_tcp
            [listener] = await nursery.start(lambda **k: listen(answer, 0, host="127.0.0.1", **k))
            url = f"https://127.0.0.1:{listener.socket.getsockname()[1]}"
            hosts = hosts_of(tmp_path, ca_file=str(certificate[0]))
            found = await hosts.connect(url, 30.0)
            await found.ask("POST", "/v1/completions", (), b"{}")
            assert (found.status, await found.next_data()) == (200, b"hi")
            found.cancel(None)  # type: ignore[arg-type]
            await hosts.answers.drain(0.0)
            assert f"host: {url.removeprefix('https://')}".encode() in heard[0]
            with pytest.raises(trio.BrokenResourceError):
                await hosts_of(tmp_path).connect(url, 30.0)
            nursery.cancel_scope.cancel()


async def test_a_host_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, timeout_s=0.05)
    with trio.socket.socket() as silent:
        await silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with trio.fail_after(PATIENCE_S), pytest.raises(OSError, match="no connection within"):
            await hosts.connect(url, 30.0)
    with pytest.raises(OSError, match="allow_http"):
        await hosts.connect("http://a.example", 30.0)


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("none", "secret"):
        with pytest.raises(ConfigError, match=r"server\.hosts\.ca_file"):
            hosts_of(tmp_path, ca_file=str(tmp_path / name))
    assert HostSecret(SECRET).text == SECRET
