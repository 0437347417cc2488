"""Requests as bytes, for clients that misbehave: no HTTP library stalls or floods on demand.

Builds what is sent; opens no sockets.
"""

from __future__ import annotations

import base64
import random
import struct


def chat_request(name: str, host: str, body: bytes, *, close: bool = False) -> bytes:
    """Return a POST of a chat completion whose client calls it `name`.

    Args:
      name: the client's id of it.
      host: what it calls the server.
      body: JSON.
      close: ask for the connection's end behind the answer.
    """
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nx-request-id: {name}\r\n"
        f"connection: {'close' if close else 'keep-alive'}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def ws_handshake(name: str, host: str) -> bytes:
    """Return the request that opens a WebSocket to the Responses API."""
    key = base64.b64encode(random.randbytes(16)).decode()
    head = (
        f"GET /v1/responses HTTP/1.1\r\nhost: {host}\r\nx-request-id: {name}\r\n"
        f"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        f"sec-websocket-key: {key}\r\n\r\n"
    )
    return head.encode()


def ws_text_frame(body: bytes) -> bytes:
    """Return one masked text frame (RFC 6455, 5.2) with an all-zero mask."""
    if len(body) < 126:
        length = struct.pack("!B", 0x80 | len(body))
    else:
        length = struct.pack("!BH", 0x80 | 126, len(body))
    return b"\x81" + length + bytes(4) + body
