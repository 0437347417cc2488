"""Tests of TLS to registries: which certificates are trusted, and what needs an explicit option."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ops.cli import main

from .docker_registry import running_registry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from store.layout import ModelStore

    from .docker_registry import DockerRegistry

NAME = "registry.example"


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve NAME to loopback."""
    resolve = socket.getaddrinfo

    def known(host: Any, *others: Any, **more: Any) -> Any:  # noqa: ANN401 (as of socket)
        return resolve("127.0.0.1" if host == NAME else host, *others, **more)

    monkeypatch.setattr("socket.getaddrinfo", known)
    for variable in ("http_proxy", "https_proxy", "all_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


def write_certificate(folder: Path) -> None:
    """Write a self-signed certificate for NAME: `ca.pem`, and `key.pem`."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, SHA256())
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )


@pytest.fixture
def certified(tmp_path: Path) -> Iterator[DockerRegistry]:
    """A registry with a self-signed certificate for NAME: `ca.pem`."""
    write_certificate(tmp_path)
    files = f"certificate: {tmp_path / 'ca.pem'}, key: {tmp_path / 'key.pem'}"
    with running_registry(tmp_path / "registry", tls=files) as running:
        yield running


def test_a_registry_is_believed_by_its_certificate(
    certified: DockerRegistry,
    source: ModelStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    location = f"oci://{NAME}:{certified.port}/chat:v1"
    push = ("model", "push", "chat:v1", location, "--store", str(source.root))
    assert main(push) == 1
    err = capsys.readouterr().err
    assert "its certificate or TLS is refused: [SSL: CERTIFICATE_VERIFY_FAILED]" in err
    assert "set the environment variable SSL_CERT_FILE to its authority's file" in err
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert main(push) == 0
    assert main(("model", "pull", location, "--store", str(tmp_path / "store"))) == 0


def test_http_beyond_this_machine_is_spoken_on_demand_only(
    registry: DockerRegistry,
    source: ModelStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    location = f"oci://{NAME}:{registry.port}/plain/chat:v1"
    push = ("model", "push", "chat:v1", location, "--store", str(source.root))
    assert main(push) == 1
    assert "or give --insecure for a registry without TLS" in capsys.readouterr().err
    assert main((*push, "--insecure")) == 0
    pull = ("model", "pull", location, "--store", str(tmp_path / "store"))
    assert main((*pull, "--insecure")) == 0
