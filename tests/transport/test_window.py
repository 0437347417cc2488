"""Tests of flow control windows: bytes in flight stay within the window, and no credit is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.window import ByteWindow, TokenWindow
from triolet.errors import LocalProtocolError, RemoteProtocolError


@given(st.integers(1, 100), st.lists(st.integers(0, 60)))
def test_bytes_under_way_stay_within_the_window(size: int, messages: list[int]) -> None:
    window = ByteWindow(size)
    under_way: list[int] = []
    for message in messages:
        if window.try_consume(message):
            under_way.append(message)
        elif under_way:
            window.release(under_way.pop(0))
        assert window.used_bytes == sum(under_way)
        assert window.used_bytes <= size or [m for m in under_way if m] == [max(under_way)]
        assert window.available_bytes == max(0, size - window.used_bytes)
    for message in under_way:
        window.release(message)
    assert window.available_bytes == size


def test_a_message_larger_than_the_window_goes_alone() -> None:
    window = ByteWindow(10)
    assert window.try_consume(25)
    assert not window.try_consume(1)
    assert window.available_bytes == 0
    window.release(25)
    assert window.try_consume(1)
    assert not window.try_consume(25)


@pytest.mark.parametrize("num_bytes", [-1, 6])
def test_credit_for_what_is_not_under_way_is_the_peers_fault(num_bytes: int) -> None:
    window = ByteWindow(10)
    window.try_consume(5)
    with pytest.raises(RemoteProtocolError):
        window.release(num_bytes)
    assert window.used_bytes == 5


def test_impossible_sizes_are_our_bug() -> None:
    with pytest.raises(LocalProtocolError):
        ByteWindow(0)
    with pytest.raises(LocalProtocolError):
        ByteWindow(1).try_consume(-1)
    with pytest.raises(RemoteProtocolError):
        TokenWindow(-1)


@given(st.lists(st.integers(0, 1000), min_size=1), st.data())
def test_grants_may_be_repeated_and_reordered(grants: list[int], data: st.DataObject) -> None:
    received = data.draw(st.permutations([*grants, *grants]))
    window = TokenWindow(0)
    for grant in received:
        before = window.allowed
        assert window.grant(grant) is (grant > before)
        assert window.allowed >= before
    assert window.allowed == max(grants)
    assert not window.may_produce(window.allowed)
    assert window.allowed == 0 or window.may_produce(window.allowed - 1)
