"""Tests of which request heads the guard passes and refuses, byte by byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.edge.http import HeadGuard
from triolet.errors import RequestError

GOOD = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"


def guard() -> HeadGuard:
    return HeadGuard(max_bytes=500, max_fields=5, max_body_bytes=1000)


@given(st.lists(st.integers(0, len(GOOD)), max_size=8))
def test_a_head_in_any_pieces_comes_out_whole(cuts: list[int]) -> None:
    subject = guard()
    given_out = b""
    edges = [0, *sorted(cuts), len(GOOD)]
    for begin, end in pairwise(edges):
        if given_out:
            given_out += GOOD[begin:end]  # the body, which the guard ignores
        else:
            given_out = subject.feed(GOOD[begin:end]) or b""
    assert given_out == GOOD
    assert not subject.has_begun


def test_empty_lines_before_a_head_are_dropped() -> None:
    assert guard().feed(b"\r\n\r\n" + GOOD) == GOOD


LINE = b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
        (LINE + b"Host: a\nX: b\r\n\r\n", 400),
        (LINE + b"Host: a\rX: b\r\n\r\n", 400),
        (LINE + b"Host: a\0\r\n\r\n", 400),
        (LINE + b"Host: a\r\n folded\r\n\r\n", 400),
        (LINE + b"Host: a\r\n\tfolded\r\n\r\n", 400),
        (LINE + b"Host : a\r\n\r\n", 400),
        (LINE + b": a\r\n\r\n", 400),
        (LINE + b"no colon\r\n\r\n", 400),
        (LINE + b"H\xc3\xa4: a\r\n\r\n", 400),
        (LINE + b"Host: a\r\nHost: b\r\n\r\n", 400),
        (LINE + b"Sec-WebSocket-Protocol: \xc3\xa9\r\n\r\n", 400),
        (LINE + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
        (LINE + b"Content-Length: 1, 1\r\n\r\n", 400),
        (LINE + b"Content-Length: +1\r\n\r\n", 400),
        (LINE + b"Content-Length: 0x1\r\n\r\n", 400),
        (LINE + b"Content-Length:\r\n\r\n", 400),
        (LINE + b"Content-Length: " + b"9" * 100 + b"\r\n\r\n", 400),
        (LINE + b"Content-Length: 1001\r\n\r\n", 413),
        (LINE + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (LINE + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (LINE + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (LINE + b"Transfer-Encoding: identity\r\n\r\n", 400),
        (LINE + b"Transfer-Encoding: \x0bchunked\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET http://a/ HTTP/1.1\r\n\r\n", 400),
        (b"GET //a/ HTTP/1.1\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT a:80 HTTP/1.1\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"GET / \r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xc3\xa4 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.2\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (LINE + b"X: y\r\n" * 6 + b"\r\n", 431),
        (LINE + b"X: " + b"y" * 600, 431),
        (b"G" * 501, 431),
    ],
)
def test_heads_that_two_parsers_could_read_differently_are_refused(
    head: bytes, status: int
) -> None:
    with pytest.raises(RequestError) as caught:
        guard().feed(head)
    assert caught.value.status == status


@given(st.binary(max_size=600))
def test_any_bytes_wait_pass_or_are_refused(data: bytes) -> None:
    subject = guard()
    try:
        passed = subject.feed(data)
    except RequestError as error:
        if error.status not in {400, 413, 431, 505}:
            raise
    else:
        assert passed is None or passed.endswith(data.lstrip(b"\r\n")[-1:])
