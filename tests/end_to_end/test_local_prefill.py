"""Tests of a real fleet without prefill workers: decode workers compute the prompts, and answers
stay the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import PATIENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

QUESTIONS = [f"Tell me a story about {n} {'big ' * (9 * n)}dragons." for n in range(1, 9)]


def answers_of(fleet: FleetProcess) -> list[str]:
    """Ask all questions concurrently; return the answers in order."""

    def ask(text: str) -> str:
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = fleet.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, QUESTIONS))


def test_a_fleet_without_prefill_says_the_same(
    fleet: FleetProcess, start_fleet: Callable[..., FleetProcess]
) -> None:
    expected = answers_of(fleet)
    alone = start_fleet(*PATIENT, "--prefill", "0", "--threads", "1")
    alone.wait_ready()
    assert len(alone.pids("prefill")) == 0
    assert answers_of(alone) == expected
    assert alone.metric("triolet_prompts_routed_total", role="decode", why="no_prefill") == len(
        QUESTIONS
    )
    [decode] = alone.wait_at_rest().answered
    assert decode.kv_bytes == 0
