"""Tests of TLS settings: http clients trust no certificate, https clients use the system's."""

from __future__ import annotations

import ssl

import httpx2
import pytest

from ops.http_trust import verify_for


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "HTTP://host", "http://[::1]:1/v1"])
def test_a_client_of_http_reads_no_certificates_and_refuses_each(url: str) -> None:
    found = verify_for(url)
    assert isinstance(found, ssl.SSLContext)
    assert found.cert_store_stats()["x509"] == 0
    assert found.verify_mode is ssl.CERT_REQUIRED
    assert found.check_hostname


@pytest.mark.parametrize("url", ["https://host", "HTTPS://host:8443/fleet"])
def test_a_client_of_https_has_the_default(url: str) -> None:
    assert verify_for(url) is True


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(httpx2.InvalidURL):
        verify_for("http://[::1")
