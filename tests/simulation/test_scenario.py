"""Tests of simulated runs: a seed always has the same trace, and no seed that runs here breaks an
invariant."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from simulation.__main__ import replay_command
from simulation.campaign import keep_quiet
from simulation.corpus import CORPUS
from simulation.faults import Fault, Tally
from simulation.scenario import simulate

ROOT = Path(__file__).parents[3]
SCRIPT = """
from simulation.campaign import keep_quiet
from simulation.scenario import simulate
keep_quiet()
print(*(simulate(seed).trace for seed in (1, 2)))
"""
NUM_RANDOM_SEEDS = 5
"""Seeds per test run; `make simulate` searches thousands."""
NUM_SEEDS_WHOLE = 100
RANDOM_SEEDS_BELOW = 10**9


@pytest.fixture(autouse=True)
def quiet() -> None:
    keep_quiet()


@pytest.mark.slow
def test_a_seed_has_the_same_trace_in_every_process_and_another_seed_another() -> None:
    here = [simulate(seed).trace for seed in (1, 2)]
    again = [simulate(seed).trace for seed in (2, 1)]
    assert here == again[::-1]
    assert len(set(here)) == 2
    elsewhere = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},  # sets iterate in another order
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert elsewhere.split() == here


@pytest.mark.slow
def test_a_story_is_told_and_hashed_alike() -> None:
    silent, told = simulate(5), simulate(5, keeps_lines=True)
    assert silent.trace == told.trace
    assert not silent.lines
    assert any("Reserve(" in line for line in told.lines)
    assert any("everything is healed" in line for line in told.lines)


@pytest.mark.slow
def test_no_seed_of_the_corpus_breaks_anything_and_every_fault_happens_there() -> None:
    tally = Tally()
    proposed = accepted = 0
    found: Counter[str] = Counter()
    shipped: Counter[str] = Counter()
    for seed, reason in CORPUS.items():
        report = simulate(seed)
        proposed, accepted = proposed + report.proposed, accepted + report.accepted
        found += report.found
        shipped += report.shipped
        assert report.violations == [], f"{reason}: {replay_command(seed)}"
        tally.add(report.tally)
    assert {fault for fault in Fault if tally.happened[fault]} == set(Fault)
    assert proposed > accepted > 0, "all guesses were accepted, or none was"
    assert found["tokens"] > 0, "no prompt shared a cached prefix"
    assert found["restored blocks"] > 0, "no block was restored from host memory"
    assert min(shipped["shared"], shipped["sent"]) > 0, "KV was only shared, or only sent"
    often = {"prefill: long", "prefill: off", "decode: short", "decode: always"}
    assert set(tally.routes) >= often, "some usual reason never routed a prompt"


@pytest.mark.promise
@pytest.mark.proof
@pytest.mark.slow
def test_no_seed_that_nobody_chose_breaks_anything(whole: bool) -> None:
    first = secrets.randbelow(RANDOM_SEEDS_BELOW)
    for seed in range(first, first + (NUM_SEEDS_WHOLE if whole else NUM_RANDOM_SEEDS)):
        report = simulate(seed)
        assert report.violations == [], f"add this seed to the corpus: {replay_command(seed)}"
