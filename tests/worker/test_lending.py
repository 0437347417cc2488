"""Tests of lending CPU cores: a worker borrows those of idle workers without waiting, and a crash
frees them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.batch import SampleSpec, StepRow
from tests import forked
from tests.engine.driver import open_engine
from triolet.config import LendingConfig
from triolet.errors import ConfigError
from triolet.sampling import SamplingParams
from worker.local_engine import TRY_EVERY, WANTED_BACK, BorrowingTrials, Cores, LocalEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = Path(__file__).parents[2] / "triolet" / "demo"
SIBLING = """
import sys
from triolet.config import LendingConfig
from worker.local_engine import Cores

cores = Cores(LendingConfig(sys.argv[1], int(sys.argv[2]), 3), 4)
for line in sys.stdin:
    print(getattr(cores, line.strip())(), flush=True)
"""
"""Locks of one process do not stand in its own way, so siblings have to be others."""


class Sibling:
    """Another worker, driven by the test."""

    def __init__(self, path: Path, place: int) -> None:
        self._process = forked.Popen(
            [sys.executable, "-c", SIBLING, str(path), str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def do(self, what: str) -> str:
        """Call one of its methods and return the result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()
        return self._process.stdout.readline().decode().strip()

    def kill(self) -> None:
        """Kill it."""
        with self._process as process:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def cores(path: Path) -> Iterator[Cores]:
    with closing(Cores(LendingConfig(str(path), 0, 3), 4)) as own:
        yield own


@pytest.fixture
def sibling(path: Path) -> Iterator[Sibling]:
    other = Sibling(path, 1)
    yield other
    other.kill()


def test_who_is_alone_has_all_cores(cores: Cores) -> None:
    assert (cores.take(), cores.give_back()) == (12, 3.0)


@pytest.mark.slow
def test_who_works_keeps_its_cores_until_it_rests(cores: Cores, sibling: Sibling) -> None:
    assert sibling.do("take") == "12"
    assert cores.take() == 4, "one has its own, and has borrowed those of the third"
    cores.give_back()
    assert sibling.do("give_back") == str(2.0 + WANTED_BACK)
    assert (cores.take(), cores.give_back()) == (8, 2.0), "between its steps it has work, too"
    sibling.do("rest")
    assert (cores.take(), cores.give_back()) == (12, 3.0)
    cores.rest()
    assert sibling.do("take") == "12"
    sibling.do("give_back")


@pytest.mark.slow
def test_an_owner_begins_although_its_cores_are_lent(cores: Cores, sibling: Sibling) -> None:
    assert cores.take() == 12
    assert sibling.do("take") == "4"
    assert cores.give_back() == 2.0 + WANTED_BACK
    assert cores.take() == 8, "the next step leaves it what is its own"
    cores.give_back()


@pytest.mark.slow
def test_of_two_workers_on_one_place_the_first_at_work_borrows(cores: Cores, path: Path) -> None:
    other = Sibling(path, 0)
    assert cores.take() == 12
    assert other.do("take") == "4"
    other.do("give_back")
    cores.give_back()
    cores.rest()
    assert other.do("take") == "12"
    other.kill()


@pytest.mark.slow
def test_nothing_is_left_of_a_worker_that_was_killed(
    cores: Cores, path: Path, sibling: Sibling
) -> None:
    assert sibling.do("take") == "12"
    sibling.kill()
    assert (cores.take(), cores.give_back()) == (12, 3.0)
    cores.rest()
    again = Sibling(path, 1)
    assert again.do("take") == "12"
    again.kill()


@pytest.mark.parametrize(("place", "places"), [(-1, 2), (2, 2), (0, 0), (0, 257)])
def test_a_place_that_is_not_there_is_refused(place: int, places: int) -> None:
    with pytest.raises(ConfigError, match="lending is 'place"):
        LendingConfig("/x", place, places)


def test_an_engine_computes_with_the_cores_that_it_gets(cores: Cores) -> None:
    engine = LocalEngine(open_engine(DEMO), cores)
    blocks = engine.ledger.lease("a", 1)
    row = StepRow([1, 2, 3], 0, blocks, SampleSpec(SamplingParams(temperature=0.0), 0))
    alone = LocalEngine(open_engine(DEMO))
    assert engine.step([row]) == alone.step([row])
    assert alone.speedup == 1.0
    assert engine.speedup in (1.0, 3.0), "1 where no kernels of our own are built"
    engine.rest()
    alone.rest()


@pytest.mark.parametrize("is_faster", [True, False])
def test_steps_borrow_where_that_was_faster_and_try_the_other_way_now_and_then(
    is_faster: bool,
) -> None:
    trials = BorrowingTrials()
    ways = []
    for _ in range(2 + 10 * TRY_EVERY):
        ways.append(trials.pays(3))
        trials.took(3, 1.0 if ways[-1] is is_faster else 2.0, is_borrowed=ways[-1])
    assert ways[:2] == [True, False]
    assert ways[2:].count(is_faster) == 10 * (TRY_EVERY - 1)
    assert trials.pays(300), "another size is tried for itself"


def test_steps_notice_that_a_neighbour_has_come() -> None:
    trials, ways = BorrowingTrials(), []
    for number in range(40 * TRY_EVERY):
        slow = number >= 20 * TRY_EVERY
        ways.append(trials.pays(1))
        took_s = (5.0 if slow else 1.0) if ways[-1] else 2.0
        trials.took(1, took_s, is_borrowed=ways[-1])
    assert ways[: 20 * TRY_EVERY].count(True) > 18 * TRY_EVERY
    assert ways[20 * TRY_EVERY :].count(True) < 3 * TRY_EVERY


def test_nothing_is_borrowed_unasked(cores: Cores) -> None:
    assert cores.take(borrows=False) == 4
    assert cores.give_back() == 1.0
    assert cores.take() == 12
