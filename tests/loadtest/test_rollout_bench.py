"""Tests of the benchmark of rollouts: its short form with real processes, and that it notices what
users must not see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest.harness.streams import Stream
from loadtest.rollout_bench import __main__ as command
from loadtest.rollout_bench.candidates import CANDIDATES, Candidate
from loadtest.rollout_bench.course import Course
from loadtest.rollout_bench.device import DeviceFault
from loadtest.rollout_bench.stores import Pair, apart_s
from loadtest.rollout_bench.traffic import Asked, kept_versions, returned

if TYPE_CHECKING:
    from pathlib import Path

PLAN = {
    "shares": (0.5, 1.0),
    "bake_s": 1.0,
    "max_step_s": 120.0,
    "retention_s": 0.5,
    "min_requests": 5,
    "min_buckets": 5,
}
GOOD, BROKEN = CANDIDATES[:2]
KILLED = CANDIDATES[-1]


@pytest.mark.slow
@pytest.mark.long
def test_a_good_version_is_promoted_and_a_broken_one_rolled_back(tmp_path: Path) -> None:
    bench = command.BenchRun(
        (BROKEN, GOOD._replace(golden=False)), tmp_path, 1, PLAN, 0.0, has_costs=False
    )
    bench.run()
    broken, good = bench.courses
    assert broken.phase in {"rolled_back", "paused"}, broken
    assert "errors" in broken.said
    assert (broken.failed_stable, broken.strays) == ([], [])
    assert good.phase == "promoted", good
    assert good.resumed > 0
    assert (good.failed, good.failed_stable, good.strays) == (0, [], [])


def course(candidate: Candidate, phase: str, **more: object) -> Course:
    fields: dict[str, object] = {
        "candidate": candidate.name,
        "phase": phase,
        "step": 1,
        "said": "",
        "fault_at": 110.0,
        "verdict_at": 115.0,
        "last_at": 116.0,
        "canary": 50,
        "failed": 0,
        "failed_stable": [],
        "strays": [],
        "resumed": 9,
        "pairs": 0,
        "waiting": 0,
        "leaks": 0,
    }
    return Course(**(fields | more))  # type: ignore[arg-type]


def missed(candidate: Candidate, one: Course) -> list[str]:
    goals = command.goals_of(candidate, [one])
    return [name.partition(": ")[2] for name, goal in goals.items() if not goal.is_met]


@pytest.mark.parametrize(
    ("candidate", "phase", "more", "expected"),
    [
        (KILLED, "rolled_back", {}, ["ended as they should"]),
        (GOOD, "promoted", {}, []),
        (GOOD, "promoted", {"failed": 1}, ["failed requests"]),
        (GOOD, "paused", {}, ["ended as they should"]),
        (BROKEN, "rolled_back", {"failed": 40}, []),
        (BROKEN, "paused", {"failed": 40}, []),
        (BROKEN, "promoted", {}, ["ended as they should"]),
        (BROKEN, "rolled_back", {"verdict_at": 121.0}, ["s from fault to verdict"]),
        (BROKEN, "rolled_back", {"last_at": 118.0}, ["s from verdict to last request"]),
        (BROKEN, "rolled_back", {"strays": ["user 7 …"]}, ["strays"]),
        (BROKEN, "rolled_back", {"leaks": 1}, ["traces of shadow copies"]),
        (BROKEN, "rolled_back", {"waiting": 1}, ["shadow rows while requests waited"]),
        (
            BROKEN,
            "rolled_back",
            {"failed_stable": ["503 no_worker"]},
            ["failed requests of the stable version"],
        ),
    ],
)
def test_what_users_must_not_see_misses_a_goal(
    candidate: Candidate, phase: str, more: dict[str, object], expected: list[str]
) -> None:
    assert missed(candidate, course(candidate, phase, **more)) == expected


def test_a_user_who_goes_back_is_found() -> None:
    def asked(user: int, *versions: str) -> list[Asked]:
        return [Asked(user, at, at + 0.5, one, "", None) for at, one in enumerate(versions)]

    steady = asked(1, "old", "old", "new", "", "new") + asked(2, "old", "old")
    assert returned(steady, "old", "new") == []
    [found] = returned(steady + asked(3, "new", "old", "old"), "old", "new")
    assert "user 3" in found
    at_once = [Asked(4, 0.0, 3.0, "new", "", None), Asked(4, 1.0, 2.0, "old", "", None)]
    assert returned(at_once, "old", "new") == [], "the order of their choices is not known"


def test_tries_after_a_failed_answer_are_other_answers() -> None:
    def answer(version: str, body: str) -> Stream:
        stream = Stream()
        head = f"HTTP/1.1 200 \r\nx-triolet-model-version: {version}\r\n\r\n"
        stream.take((head + body).encode(), 0.0)
        return stream

    cut, whole = answer("old", 'data: {"text":"a"}\n\n'), answer("old", "data: [DONE]\n\n")
    assert kept_versions([cut, whole, answer("new", "data: [DONE]\n\n")]) == ["old", "old", "new"]
    failed, nothing_more = (
        answer("new", 'data: {"error":{"code":"no_worker"}}\n\n'),
        answer("new", ""),
    )
    assert kept_versions([failed, nothing_more, whole]) == []
    assert kept_versions([cut, failed, whole]) == ["old"]


def test_times_of_different_routes_are_of_one_change_each() -> None:
    same, other = ("old", "old"), ("old", "new")
    at = [(0.0, same), (1.0, other), (1.2, same), (1.5, other), (9.0, other), (9.1, same)]
    assert apart_s([Pair(*one) for one in at]) == pytest.approx(0.55)
    assert apart_s([Pair(0.0, same)]) == 0.0


def test_a_faulty_device_fails_the_same_prompts_each_time() -> None:
    prompts = [[number, number + 1] for number in range(1000)]
    fault = DeviceFault(errors=0.2, marker=7)
    failed = [fault.fails(prompt) for prompt in prompts]
    assert failed == [fault.fails(prompt) for prompt in prompts]
    assert 150 < sum(failed) < 250
    assert failed[6]
    assert failed[7]
