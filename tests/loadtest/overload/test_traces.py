"""Tests of scaling real request traces to a small fleet, and of the error for a missing trace
file."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from loadtest.overload import arrivals as traces
from loadtest.overload.arrivals import (
    FOLDER,
    Arrival,
    NoTraceError,
    Scale,
    Sizes,
    clients,
    conversations,
)
from loadtest.overload.plan import HOUR, TRACES

if TYPE_CHECKING:
    from pathlib import Path

SCALE = Scale(rate=20.0, seconds=60.0, like=Arrival(0.0, 1, 1), sizes=Sizes())
needs_traces = pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no traces in {FOLDER}; the project does not include them"
)


@needs_traces
@pytest.mark.parametrize("name", TRACES)
def test_a_trace_comes_at_the_rate_and_size_that_was_asked_for(name: str) -> None:
    arrivals = conversations(name, SCALE)
    assert arrivals[0].at_s == 0.0
    assert len(arrivals) / arrivals[-1].at_s == pytest.approx(20.0, rel=0.02)
    prompts = sorted(a.prompt_tokens for a in arrivals)
    assert prompts[len(prompts) // 2] == pytest.approx(SCALE.sizes.prompt, rel=0.05)
    assert prompts[-1] <= SCALE.sizes.most


@needs_traces
def test_tenants_are_as_unequal_as_they_are() -> None:
    arrivals = clients(HOUR, SCALE, seed=1)
    assert len(arrivals) == pytest.approx(1200, rel=0.25)
    by_tenant = Counter(a.tenant for a in arrivals)
    assert len(by_tenant) >= 10
    [(_, most)] = by_tenant.most_common(1)
    assert most > len(arrivals) / 5
    assert arrivals == sorted(arrivals, key=lambda a: a.at_s)


def test_a_trace_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "FOLDER", tmp_path)
    with pytest.raises(NoTraceError, match="azure2023"):
        conversations("azure2023_conv.csv", SCALE)
    with pytest.raises(NoTraceError, match="servegen"):
        clients(HOUR, SCALE, seed=1)


def test_a_trace_is_stretched_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "FOLDER", tmp_path)
    rows = ["arrival_s,input_tokens,output_tokens", "0,100,10", "1,200,20", "9,400,40"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    scale = Scale(rate=1.0, seconds=3.0, like=SCALE.like, sizes=Sizes(prompt=50, output=10))
    found = [(a.at_s, a.prompt_tokens, a.output_tokens) for a in conversations("t.csv", scale)]
    assert found == [(0.0, 25, 5), (pytest.approx(2 / 9), 50, 10), (2.0, 100, 20)]
