"""When refused clients are told to come back: what one tenant does must not move the others'."""

from __future__ import annotations

import pytest

from server.fleet.brownout import Level
from server.fleet.forecast import Ask
from server.fleet.observer import SilentOverloadObserver
from server.fleet.overload import Overload
from server.fleet.prediction import Capacity
from server.fleet.promises import GRACE_S, MOST_S, PATIENCE_S, SLACK, Promises
from triolet.config_overload import AdmissionConfig, OverloadConfig, SloConfig
from triolet.errors import RequestError
from triolet.service_class import Claim, ServiceClass

RATE = 10_000.0
ROOM_S = 2.0
DRAW = 0.4  # as long as it is predicted
ONE, OTHER = Claim("one"), Claim("other")
SHEDDABLE = Claim("other", service_class=ServiceClass.SHEDDABLE)


class Door:
    """Refuses everybody at one moment.

    Args:
      max_promises: that are remembered.
    """

    def __init__(self, max_promises: int = 100_000) -> None:
        self.promises = Promises(max_promises)
        self._last_key = 0

    def told(
        self,
        claim: Claim,
        num_tokens: int = 50,
        *,
        room_in_s: float = ROOM_S,
        is_known: bool = True,
        most_s: float = MOST_S,
        draw: float = DRAW,
    ) -> float:
        self._last_key += 1
        return self.promises.promise(
            self._last_key if is_known else 0,
            claim,
            num_tokens,
            room_in_s=room_in_s,
            tokens_per_s=RATE,
            draw=draw,
            now=0.0,
            most_s=most_s,
        )


def test_a_tenants_flood_is_its_own_line() -> None:
    door = Door()
    for _ in range(2000):
        door.told(ONE, 5000)
    assert door.told(ONE) == pytest.approx(1250.0, rel=0.01)
    assert door.told(OTHER) == pytest.approx(ROOM_S, abs=0.1)


def test_a_tenant_waits_behind_its_own_and_behind_others_as_far_as_their_shares_go() -> None:
    door = Door()
    for _ in range(1000):
        door.told(ONE, 1000)
    for _ in range(100):
        door.told(OTHER, 1000)
    # Ten seconds of its own, and as many of the other's, at 0.8 of the rate.
    assert door.told(OTHER) == pytest.approx(ROOM_S + 20.0 / 0.8, rel=0.05)
    heavy = Claim("heavy", weight=4.0)
    for _ in range(100):
        door.told(heavy, 1000)
    assert door.told(heavy) == pytest.approx(ROOM_S + 15.0 / 0.8, rel=0.05)
    for _ in range(900):
        door.told(OTHER, 1000)
    assert door.told(OTHER) == pytest.approx(door.told(ONE), rel=0.05)


def test_what_higher_classes_were_promised_goes_before_whoever_elses_it_is() -> None:
    door = Door()
    for _ in range(100):
        door.told(ONE, 1000)
    door.told(Claim("one", service_class=ServiceClass.SHEDDABLE))
    assert door.told(SHEDDABLE) >= 10.0


def test_who_is_not_remembered_takes_nobodys_room() -> None:
    door = Door()
    for _ in range(100):
        door.told(ONE, 5000, is_known=False)
    assert len(door.promises) == 0
    assert door.told(ONE) == pytest.approx(ROOM_S, abs=0.1)
    full = Door(2)
    for _ in range(100):
        full.told(ONE, 5000)
    assert full.told(ONE) == pytest.approx(ROOM_S + 0.5 / 0.8, abs=0.3)


def test_one_far_promise_leaves_what_is_sooner_to_others() -> None:
    door = Door()
    door.told(ONE, room_in_s=50.0)
    assert door.told(ONE) == pytest.approx(ROOM_S, abs=0.1)


def test_no_tenant_takes_all_that_is_remembered() -> None:
    door = Door(100)
    numbers = []
    for name in ("a", "b", "c"):
        was = len(door.promises)
        for _ in range(200):
            door.told(Claim(name))
        numbers.append(len(door.promises) - was)
    assert numbers == [50, 25, 13]
    door.promises.forget(MOST_S)
    for _ in range(200):
        door.told(ONE)
    assert len(door.promises) == 50


def test_beyond_the_most_that_is_told_nothing_is_promised() -> None:
    door = Door()
    told = [door.told(ONE, 5000, most_s=PATIENCE_S, draw=n % 11 / 10) for n in range(1000)]
    assert max(told) <= PATIENCE_S
    # Nor do they all come at once.
    assert len(set(told[-11:])) == 11
    assert door.told(ONE) <= PATIENCE_S


def test_promises_that_had_their_use_leave_nothing_behind() -> None:
    promises = Promises(1000)
    for key in range(1, 2000):
        promises.promise(
            key, ONE, 50, room_in_s=900.0, tokens_per_s=RATE, draw=DRAW, now=float(key)
        )
        promises.redeem(key, float(key))
        assert len(promises) == 0
        assert promises.num_notes <= SLACK + 2
    promises.promise(5000, ONE, 50, room_in_s=1.0, tokens_per_s=RATE, draw=DRAW, now=2000.0)
    promises.forget(4000.0)
    assert (len(promises), promises.num_notes) == (0, 0)


def test_what_a_tenant_was_promised_is_before_its_newcomers_and_before_others_by_its_share() -> (
    None
):
    door = Door()
    soon = door.told(OTHER, 100)
    later = door.told(ONE, 1000, room_in_s=10.0)
    door.told(ONE, 3000, room_in_s=0.5)
    ahead = door.promises.ahead_tokens
    assert ahead(ONE, later + 1.0, 0.0) == 4100.0
    # Of as much as its own at the same time, whatever comes after.
    assert ahead(OTHER, soon + 1.0, 0.0) == 200.0
    assert ahead(OTHER, later + 1.0, soon + 1.0) == 0.0
    assert ahead(Claim("third"), later + 1.0, 0.0) == 0.0


def test_who_is_late_is_known_and_not_waited_for() -> None:
    door = Door()
    due = door.told(ONE, 1000)
    assert door.promises.ahead_tokens(ONE, 1.0, due) == 1000.0
    assert door.promises.ahead_tokens(ONE, 1.0, due + 1.0) == 0.0
    assert door.promises.kept_by(1, due + 1.0) is not None
    assert door.promises.kept_by(1, due + GRACE_S + 0.1) is None


def refusing() -> Overload:
    slo = SloConfig(2.0, 2.0, 2.0)
    one = Overload(OverloadConfig(slo, AdmissionConfig()), SilentOverloadObserver(), 0.0)
    one.prediction.see(Capacity(64, RATE, RATE))
    return one


def told_by(one: Overload, ask: Ask, tokens_ahead: float) -> float:
    with pytest.raises(RequestError) as refusal:
        one.judge(ask, tokens_ahead, 0.0)
    assert refusal.value.retry_after_s is not None
    return refusal.value.retry_after_s


def test_who_could_never_be_in_time_takes_nobodys_room() -> None:
    calm, lied_to = refusing(), refusing()
    told_by(lied_to, Ask(ONE, 300_000, 0.01, 1), 50_000.0)
    ask = Ask(OTHER, 50, 600.0, 2)
    assert told_by(lied_to, ask, 50_000.0) == told_by(calm, ask, 50_000.0)
    ask = Ask(ONE, 50, 600.0, 3)
    assert told_by(lied_to, ask, 50_000.0) == pytest.approx(told_by(calm, ask, 50_000.0), abs=0.1)


def test_in_brownout_nobody_is_told_more_than_official_clients_bear() -> None:
    one = refusing()
    one.brownout.level = Level.CRITICAL_ONLY
    told = [told_by(one, Ask(ONE, 5000, 600.0, key), 50_000.0) for key in range(1, 1000)]
    assert max(told) <= PATIENCE_S
    one.brownout.level = Level.NORMAL
    assert told_by(one, Ask(ONE, 50, 600.0, 1000), 50_000.0) <= PATIENCE_S
