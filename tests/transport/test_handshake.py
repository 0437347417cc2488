"""Tests of the HELLO handshake: which peers may work together, and the reasons that refused ones
get."""

from __future__ import annotations

import msgspec
import pytest

from transport import handshake
from transport.frames import (
    MAX_TEXT,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Capacity,
    Goodbye,
    Hello,
    Peer,
    Welcome,
)
from transport.handshake import (
    agree_version,
    answer_hello,
    check_welcome,
    goodbye,
    make_hello,
)
from triolet.adapter_keys import adapters_mark
from triolet.ids import PeerId, Role

MODEL = "llama/f32/abc"
SERVER = PeerId(Role.SERVER, "web-0", 1)
PREFILL = PeerId(Role.PREFILL, "prefill-0", 2)
DECODE = PeerId(Role.DECODE, "decode-0", 3)
CAPACITY = Capacity(100, 16, 1024, 8, 512)


def asked(hello: Hello) -> Welcome | Goodbye:
    return answer_hello(
        hello,
        me=DECODE,
        expected={Role.SERVER, Role.PREFILL},
        fingerprint=MODEL,
        capacity=CAPACITY,
        kv_address="ipc:///x",
    )


def test_server_and_prefill_are_welcome() -> None:
    for hello in (make_hello(SERVER), make_hello(PREFILL, MODEL)):
        assert asked(hello) == Welcome(
            Peer.of(DECODE), PROTOCOL_VERSION, MODEL, CAPACITY, "ipc:///x"
        )


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (make_hello(PREFILL, "llama/f32/other"), "model"),
        (make_hello(PREFILL), "(none)"),
        (make_hello(PeerId(Role.DECODE, "decode-1", 4), MODEL), "only prefill, server may"),
        (Hello(Peer.of(SERVER), PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1), "upgrade"),
        (Hello(Peer.of(SERVER), OLDEST_PROTOCOL_VERSION - 1, 0), "upgrade"),
    ],
    ids=["other model", "no model", "other role", "too new", "too old"],
)
def test_the_refused_are_told_why(hello: Hello, reason: str) -> None:
    answer = asked(hello)
    assert isinstance(answer, Goodbye)
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"),
    [
        (OLDEST_PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION),
        (PROTOCOL_VERSION, PROTOCOL_VERSION + 1, PROTOCOL_VERSION),
        (OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION + 5, PROTOCOL_VERSION),
        (0, OLDEST_PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION),
        (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1, None),
        (0, OLDEST_PROTOCOL_VERSION - 1, None),
    ],
)
def test_the_newest_common_version_is_agreed(oldest: int, newest: int, agreed: int | None) -> None:
    assert agree_version(oldest, newest) == agreed


def test_the_connecting_side_checks_who_answered() -> None:
    welcome = asked(make_hello(PREFILL, MODEL))
    assert isinstance(welcome, Welcome)
    assert check_welcome(welcome, me=PREFILL, expected=Role.DECODE, fingerprint=MODEL) is None
    assert check_welcome(welcome, me=SERVER, expected=Role.DECODE) is None
    other_model = check_welcome(welcome, me=PREFILL, expected=Role.DECODE, fingerprint="x")
    other_role = check_welcome(welcome, me=SERVER, expected=Role.PREFILL)
    newer = msgspec.structs.replace(welcome, version=PROTOCOL_VERSION + 1)
    other_version = check_welcome(newer, me=SERVER, expected=Role.DECODE)
    reasons = [bye.reason for bye in (other_model, other_role, other_version) if bye is not None]
    assert len(reasons) == 3
    assert "model" in reasons[0]
    assert "expected a prefill" in reasons[1]
    assert "upgrade" in reasons[2]


def test_workers_that_differ_in_their_adapters_exchange_kv() -> None:
    """Adapters may differ while a fleet loads one; each worker checks the adapter of a sequence."""
    marks = [adapters_mark(one) for one in ([], [b"a" * 32], [b"a" * 32, b"b" * 32])]
    for theirs in marks:
        answer = asked(make_hello(PREFILL, f"{MODEL}{theirs}"))
        assert isinstance(answer, Welcome)
        for ours in marks:
            welcome = msgspec.structs.replace(answer, fingerprint=f"{MODEL}{ours}")
            mine = f"{MODEL}{theirs}"
            assert (
                check_welcome(welcome, me=PREFILL, expected=Role.DECODE, fingerprint=mine) is None
            )
    assert isinstance(asked(make_hello(PREFILL, f"other{marks[1]}")), Goodbye)


def test_a_reason_always_fits_on_the_wire() -> None:
    assert len(goodbye("x" * 2 * MAX_TEXT).reason) == MAX_TEXT


def test_an_operator_needs_no_model_and_is_welcome_where_operators_are() -> None:
    hello = make_hello(PeerId(Role.OPERATOR, "operator", 9))
    answer = answer_hello(
        hello,
        me=DECODE,
        expected={Role.OPERATOR},
        fingerprint=MODEL,
        capacity=CAPACITY,
    )
    assert isinstance(answer, Welcome)
    assert isinstance(asked(hello), Goodbye)


@pytest.mark.parametrize(
    ("theirs", "agreed"), [((2, 3), None), ((3, 4), 4), ((4, 5), 5), ((5, 6), 5), ((6, 7), None)]
)
def test_both_sides_agree_with_one_release_before_and_after(
    theirs: tuple[int, int], agreed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "OLDEST_PROTOCOL_VERSION", 4)
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 5)
    oldest, newest = theirs
    answer = asked(Hello(Peer.of(SERVER), newest, oldest))
    assert (answer.version if isinstance(answer, Welcome) else None) == agreed
    # The other way round: a version agreed with us is a version that we accept.
    if agreed is not None:
        welcome = Welcome(Peer.of(DECODE), agreed, MODEL, CAPACITY)
        assert check_welcome(welcome, me=SERVER, expected=Role.DECODE) is None
