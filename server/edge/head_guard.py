"""What of a request's head is refused before any parser sees it.

Knows bytes and limits. h11 parses and is lenient where two parsers may disagree: a bare line feed,
a folded line, Content-Length beside Transfer-Encoding, a target in absolute form. A proxy in front
that reads such a head differently sees other requests than we do (request smuggling), so none of it
passes. Never interprets what it lets through, knows no socket and no clock.
"""

from __future__ import annotations

import re

from ..api.errors import http_error, too_large
from .client_address import PROXY_SIGNATURE

_END = b"\r\n\r\n"
_PROXY_PROTOCOL = PROXY_SIGNATURE.lstrip(b"\r\n")
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\0")
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/(\d\.\d)")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-type"})


class HeadGuard:
    """Collects the head of one request after the other on one connection."""

    def __init__(self, max_bytes: int, max_fields: int, max_body_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_fields = max_fields
        self._max_body_bytes = max_body_bytes
        self._held = bytearray()

    @property
    def has_begun(self) -> bool:
        """Whether part of a head waits for its rest."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes that begin or continue a head.

        Returns:
          The whole head and whatever came behind it, or None while it is incomplete.

        Raises:
          RequestError: it is refused; the connection cannot be used any more.
        """
        self._held += data
        # Some clients of old send an empty line after a body; it belongs to no request.
        while self._held.startswith(b"\r\n"):
            del self._held[:2]
        end = self._held.find(_END)
        head = bytes(self._held[:end] if end >= 0 else self._held)
        if end < 0 and head.endswith(b"\r"):
            head = head[:-1]  # its line feed may be on its way
        if head.startswith(_PROXY_PROTOCOL):
            raise http_error(
                400, "PROXY protocol from an address that --trusted-proxies does not name"
            )
        if _BARE.search(head):
            raise http_error(400, "the request's head holds a bare CR, LF or NUL")
        if len(head) > self._max_bytes:
            raise http_error(431, f"the request's head is larger than {self._max_bytes} bytes")
        if end < 0:
            return None
        self._check(head)
        whole = bytes(self._held)
        self._held.clear()
        return whole

    def _check(self, head: bytes) -> None:
        line, *fields = head.split(b"\r\n")
        version = self._check_request_line(line)
        if len(fields) > self._max_fields:
            raise http_error(431, f"the request has more than {self._max_fields} header fields")
        values: dict[bytes, bytes] = {}
        for text in fields:
            name, colon, value = text.partition(b":")
            if not colon or not _NAME.fullmatch(name):
                raise http_error(400, "a header field is malformed or folded")
            name = name.lower()
            if name in _ONCE and name in values:
                raise http_error(400, f"the header {name.decode()} occurs twice")
            if name.startswith(b"sec-websocket-") and not value.isascii():
                # wsproto takes them for ASCII and raises.
                raise http_error(400, f"the header {name.decode()} is not ASCII")
            values[name] = value.strip(b" \t")
        self._check_framing(values, version)

    def _check_request_line(self, line: bytes) -> bytes:
        match = _REQUEST_LINE.fullmatch(line)
        if match is None:
            raise http_error(400, "the request line is malformed")
        _, target, version = match.groups()
        if version not in {b"1.0", b"1.1"}:
            raise http_error(
                505, "only HTTP/1.1 is spoken here; HTTP/2 is for the proxy in front of it"
            )
        if not target.startswith(b"/") or target.startswith(b"//"):
            raise http_error(400, "the request target is not a path")
        return version

    def _check_framing(self, values: dict[bytes, bytes], version: bytes) -> None:
        length = values.get(b"content-length")
        encoding = values.get(b"transfer-encoding")
        if encoding is not None:
            if length is not None or version == b"1.0":
                raise http_error(400, "Transfer-Encoding beside Content-Length or in HTTP/1.0")
            if encoding.lower() != b"chunked":
                raise http_error(400, "the only Transfer-Encoding understood is chunked")
        if length is not None:
            if not length.isdigit() or len(length) > 15:
                raise http_error(400, "Content-Length is not a number of bytes")
            if int(length) > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
