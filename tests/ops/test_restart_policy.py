"""Tests of the supervisor's restart policy: the delays between restarts of a process, and when it
gives up."""

from __future__ import annotations

import pytest

from ops.settings.conversion import converted
from ops.supervisor.restart_policy import Ending, GiveUp, Restart, RestartPolicy
from triolet.config import SupervisorConfig
from triolet.errors import ConfigError

CONFIG = SupervisorConfig(
    restart_delay_s=0.1, max_restart_delay_s=1.0, stable_s=30.0, max_failed_starts=3
)
KILLED = Ending(code=-9)


def new_policy() -> RestartPolicy:
    return RestartPolicy("decode-0", CONFIG)


def test_the_first_restart_is_at_once_and_later_delays_double_up_to_the_cap() -> None:
    policy = new_policy()
    delays = []
    for now in range(7):
        policy.became_ready(float(now))
        delays.append(policy.ended(float(now), KILLED))
    assert delays == [
        Restart(delay_s, num_deaths=number + 1, within_s=float(number))
        for number, delay_s in enumerate((0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0))
    ]


def test_a_thousand_deaths_after_ready_never_give_up_nor_overflow() -> None:
    policy = new_policy()
    for _ in range(1000):
        policy.became_ready(0.0)
        verdict = policy.ended(0.0, KILLED)
    assert verdict == Restart(1.0, num_deaths=1000)


@pytest.mark.parametrize(("life_s", "delay_s"), [(29.9, 0.1), (30.0, 0.0), (3000.0, 0.0)])
def test_a_long_enough_life_clears_the_record(life_s: float, delay_s: float) -> None:
    policy = new_policy()
    policy.became_ready(0.0)
    policy.ended(1.0, KILLED)
    policy.became_ready(2.0)
    in_a_row = {"num_deaths": 2, "within_s": 1.0 + life_s} if delay_s else {"num_deaths": 1}
    assert policy.ended(2.0 + life_s, KILLED) == Restart(delay_s, **in_a_row)


def test_a_process_that_left_in_order_did_not_die() -> None:
    policy = new_policy()
    for now in range(5):
        policy.became_ready(float(now))
        assert policy.ended(float(now), Ending(0)) == Restart(0.1, was_asked_for=True)
    policy.became_ready(9.0)
    assert policy.ended(9.0, KILLED) == Restart(0.0, num_deaths=1)
    # Code 0 before ready is not a requested exit.
    assert policy.ended(9.0, Ending(0)) == Restart(0.1, num_deaths=2)


def test_deaths_before_ready_in_a_row_end_the_trying() -> None:
    policy = new_policy()
    assert isinstance(policy.ended(0.0, KILLED), Restart)
    assert isinstance(policy.ended(1.0, KILLED), Restart)
    verdict = policy.ended(2.0, KILLED)
    assert isinstance(verdict, GiveUp)
    assert verdict.exit_code == 1
    assert "decode-0 was killed by SIGKILL 3 times" in verdict.message


def test_reaching_ready_forgives_failed_starts() -> None:
    policy = new_policy()
    for _ in range(4):
        assert isinstance(policy.ended(0.0, KILLED), Restart)
        assert isinstance(policy.ended(0.0, KILLED), Restart)
        policy.became_ready(0.0)
        assert isinstance(policy.ended(0.0, KILLED), Restart)
        policy.became_ready(0.0)


@pytest.mark.parametrize("was_ready", [False, True])
def test_a_cause_that_cannot_heal_gives_up_at_once(was_ready: bool) -> None:
    policy = new_policy()
    if was_ready:
        policy.became_ready(0.0)
    verdict = policy.ended(1.0, Ending(code=2, failure="config.json is missing"))
    assert verdict == GiveUp("decode-0: config.json is missing", 2)


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (Ending(0), "exited with code 0"),
        (Ending(1), "exited with code 1"),
        (Ending(-9), "was killed by SIGKILL"),
        (Ending(-15), "was killed by SIGTERM"),
        (Ending(-250), "was killed by signal 250"),
        (Ending(-9, was_silent=True), "reported nothing while starting and was killed"),
    ],
)
def test_an_ending_reads_as_what_happened(ending: Ending, text: str) -> None:
    assert str(ending) == text


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_control_is_not_tried_again_at_once_and_for_ever(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"^control_retry_s is .*; allowed: > 0"):
        converted({"control_retry_s": seconds}, SupervisorConfig)
