"""Tests of parsing client addresses from proxies, and of rejecting look-alikes."""

from __future__ import annotations

import struct
from contextlib import suppress
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.edge.client_address import (
    MAX_HOPS,
    MAX_PREAMBLE_BYTES,
    PROXY_SIGNATURE,
    Opening,
    Preamble,
    TrustedProxies,
    counted_address,
)
from triolet.config import ServerConfig
from triolet.errors import ConfigError, RequestError

PROXIES = TrustedProxies(["10.0.0.0/8", "fd00::/8"])


def preamble(source: str, *, command: int = 0x21, tlvs: bytes = b"") -> bytes:
    address = ip_address(source)
    family = 0x11 if address.version == 4 else 0x21
    body = address.packed * 2 + struct.pack("!HH", 50_000, 443) + tlvs
    return PROXY_SIGNATURE + struct.pack("!BBH", command, family, len(body)) + body


@pytest.mark.parametrize(
    ("name", "value", "client"),
    [
        ("x-forwarded-for", "192.0.2.1", "192.0.2.1"),
        ("x-forwarded-for", "6.6.6.6, 192.0.2.1 , 10.0.0.9", "192.0.2.1"),
        ("x-forwarded-for", "nonsense, 192.0.2.1:5678", "192.0.2.1"),
        ("x-forwarded-for", "[2001:db8::1]:443, 10.1.1.1", "2001:db8::1"),
        ("x-forwarded-for", "::ffff:192.0.2.1", "192.0.2.1"),
        ("x-forwarded-for", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("x-forwarded-for", "192.0.2.1, unknown", None),
        ("x-forwarded-for", "192.0.2.1,", None),
        ("x-forwarded-for", "<local>", None),
        ("x-forwarded-for", "127.0.0.1 10.0.0.1", None),
        ("x-forwarded-for", "fe80::1%eth0", None),
        ("x-forwarded-for", ", ".join(["10.0.0.1"] * (MAX_HOPS + 1)), None),
        ("forwarded", "for=192.0.2.1;proto=https;by=10.0.0.1", "192.0.2.1"),
        ("forwarded", 'For="[2001:db8::1]:4711", for=10.0.0.1', "2001:db8::1"),
        ("forwarded", 'for=6.6.6.6, by="a,b";for=192.0.2.1', "192.0.2.1"),
        ("forwarded", "for=192.0.2.1, proto=https", None),
        ("forwarded", "for=_hidden", None),
        ("forwarded", "for=192.0.2.1;for=6.6.6.6", None),
        ("forwarded", 'for="192.0.2.1', None),
        ("forwarded", "192.0.2.1", None),
        ("x-real-ip", "192.0.2.1", None),
    ],
)
def test_the_last_address_that_is_no_proxy_counts(
    name: str, value: str, client: str | None
) -> None:
    assert PROXIES.client_of([(name.encode(), value.encode())]) == client


def test_two_headers_that_disagree_name_no_client() -> None:
    listed, other = (b"x-forwarded-for", b"192.0.2.1"), (b"forwarded", b"for=6.6.6.6")
    assert PROXIES.client_of([listed, other]) is None
    assert PROXIES.client_of([listed, (b"forwarded", b"for=192.0.2.1")]) == "192.0.2.1"
    assert PROXIES.client_of([(b"x-forwarded-for", b"6.6.6.6"), listed]) == "192.0.2.1"


@given(st.binary(max_size=200), st.sampled_from([b"forwarded", b"x-forwarded-for"]))
def test_any_value_is_an_address_or_none(value: bytes, name: bytes) -> None:
    client = PROXIES.client_of([(name, value)])
    assert client is None or ip_address(client)


def test_who_is_trusted() -> None:
    assert PROXIES.trusts("10.255.0.1")
    assert PROXIES.trusts("::ffff:10.0.0.1")
    assert PROXIES.trusts("fd00::1%eth0")
    for stranger in ("127.0.0.1", "192.0.2.1", "2001:db8::1", "<local>", "", None):
        assert not PROXIES.trusts(stranger)
    assert not TrustedProxies().trusts("127.0.0.1")


def test_connections_of_one_ipv6_network_of_64_bits_are_counted_together() -> None:
    assert counted_address("2001:db8::1") == counted_address("2001:db8::ffff:1")
    assert counted_address("2001:db8::1") != counted_address("2001:db8:0:1::1")
    assert counted_address("::ffff:192.0.2.1") == counted_address("192.0.2.1") == "192.0.2.1"
    assert counted_address("::1") == "::/64"


@pytest.mark.parametrize(
    ("data", "opening"),
    [
        (preamble("192.0.2.1"), Opening("192.0.2.1", b"GET")),
        (preamble("2001:db8::1"), Opening("2001:db8::1", b"GET")),
        (preamble("::ffff:192.0.2.1"), Opening("192.0.2.1", b"GET")),
        (preamble("192.0.2.1", tlvs=b"\x04\x00\x01x"), Opening("192.0.2.1", b"GET")),
        (preamble("192.0.2.1", command=0x20), Opening(None, b"GET")),
        (PROXY_SIGNATURE + b"\x20\x00\x00\x00", Opening(None, b"GET")),
        (PROXY_SIGNATURE + b"\x21\x00\x00\x02ab", Opening(None, b"GET", is_unnamed=True)),
        (b"", Opening(None, b"GET")),
        (b"\r\n", Opening(None, b"\r\nGET")),
    ],
)
def test_a_preamble_names_the_client_however_it_is_cut(data: bytes, opening: Opening) -> None:
    assert Preamble().feed(data + b"GET") == opening
    for cut in range(1, len(data)):
        pieces = Preamble()
        first = pieces.feed(data[:cut])
        assert (pieces.feed(data[cut:] + b"GET") if first is None else first) is not None
        if data.startswith(PROXY_SIGNATURE):
            assert first is None


@pytest.mark.parametrize(
    "data",
    [
        PROXY_SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12),
        PROXY_SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12),
        PROXY_SIGNATURE + b"\x21\x11\x00\x0b" + bytes(11),
        PROXY_SIGNATURE + b"\x21\x21\x00\x0c" + bytes(12),
        PROXY_SIGNATURE + b"\x21\x31\x00\xd8" + bytes(216),
        PROXY_SIGNATURE + b"\x21\x11" + struct.pack("!H", MAX_PREAMBLE_BYTES),
    ],
)
def test_a_malformed_preamble_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        Preamble().feed(data)
    assert raised.value.status == 400


@given(st.binary(max_size=64))
def test_any_bytes_behind_the_signature_wait_or_are_refused_or_name_an_address(
    data: bytes,
) -> None:
    opening = None
    with suppress(RequestError):
        opening = Preamble().feed(PROXY_SIGNATURE + data)
    assert opening is None or opening.host is None or ip_address(opening.host)


@pytest.mark.parametrize("network", ["10.0.0.1/8", "here", "", "10.0.0.0/33"])
def test_a_network_that_is_none_is_named(network: str) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        ServerConfig("", "", (), (), trusted_proxies=(network,))
