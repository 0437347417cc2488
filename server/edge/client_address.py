"""Finds the real client's address behind trusted proxies.

Reads PROXY protocol v2 at the start of a connection, and `Forwarded` (RFC 7239) or
`X-Forwarded-For` in a request's head, but only if the peer of the connection is in a configured
network. Pure: bytes and addresses, no sockets, no clock.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Final, NamedTuple

from ..api.errors import http_error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from ipaddress import IPv4Address

PROXY_SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
"""Start of PROXY protocol v2; no HTTP request starts like this."""
_FIXED_BYTES: Final = 16
MAX_PREAMBLE_BYTES: Final = 4096
"""Addresses take 36 bytes; certificate names and load balancer ids after them some hundred, and
both are skipped."""
MAX_HOPS: Final = 32
"""Maximum proxies named by one request; more is not a real chain of proxies."""
_LOCAL, _PROXY = 0x20, 0x21
_ADDRESS_BYTES: Final = {0x11: 4, 0x21: 16}
"""Bytes of the source address, which comes first, for TCP over IPv4 and over IPv6."""
_FAMILY_BYTES: Final = {0x00: 0, 0x11: 12, 0x21: 36}
"""Bytes of both addresses and ports. Other families do not arrive over TCP."""
_PAIR: Final = re.compile(
    r"[ \t]*([!#$%&'*+\-.^_`|~0-9A-Za-z]+)="
    r"(?:\"((?:[^\"\\]|\\.)*)\"|([!#$%&'*+\-.^_`|~0-9A-Za-z]+))[ \t]*([;,]|$)"
)
_NODE: Final = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::\d{1,5})?|(\d+\.\d+\.\d+\.\d+)(?::\d{1,5})?")
_V6_CLIENT_BITS: Final = 64
"""Prefix of an IPv6 subscriber, who has at least this network: any number of addresses."""


def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, with an IPv4-mapped IPv6 address as IPv4; None if the text is not one."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def counted_address(host: str) -> str:
    """Return the key under which a host's connections are counted: for IPv6, its /64 network."""
    address = parsed_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _V6_CLIENT_BITS), strict=False))
    return host if address is None else str(address)


class TrustedProxies:
    """The networks of proxies that are trusted to name their clients.

    Args:
      networks: networks in CIDR notation.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = [ip_network(network) for network in networks]

    def trusts(self, host: str | None) -> bool:
        """Return whether an address is in one of the networks."""
        if not self._networks or host is None:
            return False
        address = parsed_address(host.partition("%")[0])
        return address is not None and any(address in network for network in self._networks)

    def client_of(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return the client named by a trusted peer: the last address that is not a proxy's.

        A proxy writes one of the two headers and passes on the other as received, so if both exist
        they must agree.

        Args:
          headers: request headers, names in lower case.

        Returns:
          The address; None if none is named or the headers are ambiguous, and then the peer is the
          client.
        """
        chains: dict[bytes, list[str]] = {}
        for name, value in headers:
            if name in (b"forwarded", b"x-forwarded-for"):
                chains.setdefault(name, []).append(value.decode("latin-1"))
        named = {self._walk(name, ",".join(values)) for name, values in chains.items()}
        return named.pop() if len(named) == 1 else None

    def _walk(self, name: bytes, value: str) -> str | None:
        nodes = _forwarded_nodes(value) if name == b"forwarded" else _listed_nodes(value)
        found = None
        for node in reversed(nodes[-MAX_HOPS - 1 :]):
            address = None if node is None else parsed_address(node)
            if address is None:
                return None
            found = str(address)
            if not self.trusts(found):
                return found
        return found if len(nodes) <= MAX_HOPS else None


def _listed_nodes(value: str) -> list[str | None]:
    return [_host(node.strip(" \t")) for node in value.split(",")]


def _forwarded_nodes(value: str) -> list[str | None]:
    """Return the client of each element of `Forwarded`; [None] if it is malformed."""
    nodes: list[str | None] = []
    node: str | None = None
    at, has_node, mark = 0, False, ","
    while mark:
        pair = _PAIR.match(value, at)
        if pair is None:
            return [None]
        name, quoted, token, mark = pair.groups()
        at = pair.end()
        if name.lower() == "for":
            if has_node:
                return [None]
            has_node, node = True, _host(token if quoted is None else quoted)
        if mark != ";":
            nodes.append(node)
            node, has_node = None, False
    return nodes


def _host(node: str) -> str | None:
    """Return the address of a node that may have a port; None for anything else."""
    match = _NODE.fullmatch(node)
    if match is not None:
        return match[1] or match[2]
    return node if ":" in node and "%" not in node else None  # IPv6 without brackets


class Opening(NamedTuple):
    """The start of a trusted peer's connection.

    Attributes:
      host: the client that a proxy connects for; None if it speaks for itself.
      rest: the bytes that follow.
      is_unnamed: whether its PROXY header names no address for the client.
    """

    host: str | None
    rest: bytes
    is_unnamed: bool = False


class Preamble:
    """Parses a possible PROXY protocol v2 header at the start of a connection."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> Opening | None:
        """Add the first bytes of a connection.

        Returns:
          None while more bytes are needed.

        Raises:
          RequestError: a malformed PROXY protocol header.
        """
        held = self._held = self._held + data
        if not held.startswith(PROXY_SIGNATURE[: len(held)]):
            return Opening(None, held)
        if len(held) < _FIXED_BYTES:
            return None
        command, family = held[12], held[13]
        end = _FIXED_BYTES + int.from_bytes(held[14:16], "big")
        if command not in (_LOCAL, _PROXY):
            raise http_error(400, "the PROXY protocol header has an unknown version or command")
        if end > MAX_PREAMBLE_BYTES:
            raise http_error(400, f"the PROXY protocol header has over {MAX_PREAMBLE_BYTES} bytes")
        if command == _PROXY and end < _FIXED_BYTES + _FAMILY_BYTES.get(family, MAX_PREAMBLE_BYTES):
            raise http_error(400, "the PROXY protocol header contains no TCP address")
        if len(held) < end:
            return None
        host = None
        if command == _PROXY and (size := _ADDRESS_BYTES.get(family)):
            host = str(parsed_address(str(ip_address(held[_FIXED_BYTES : _FIXED_BYTES + size]))))
        return Opening(host, held[end:], is_unnamed=command == _PROXY and host is None)
