"""Tests of one prompt through server, prefill and decode: roles, pools and KV bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from triolet.ids import Role

from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow


def chat(fleet: FleetProcess, text: str, **more: object) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, **more}
    answer = fleet.client.post("/v1/chat/completions", json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def kv_bytes_received(fleet: FleetProcess) -> int:
    """Return the decode worker's own report."""
    audits = fleet.wait_at_rest().answered
    return sum(audit.kv_bytes for audit in audits if audit.role is Role.DECODE)


def test_three_roles_run_as_processes_of_their_own(fleet: FleetProcess) -> None:
    for role in ("server", "prefill", "decode"):
        assert len(fleet.pids(role)) == 1, role


def test_each_worker_holds_its_own_pool(fleet: FleetProcess) -> None:
    fleet.wait_all_blocks_free()
    for pool in ("prefill", "decode"):
        assert fleet.kv_blocks(pool)["free"] > 0


def test_a_question_is_answered(fleet: FleetProcess) -> None:
    answer = chat(fleet, "Hello!", temperature=0)
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] in {"stop", "length"}


def test_kv_bytes_received_are_the_whole_blocks_of_the_prompts(fleet: FleetProcess) -> None:
    before = kv_bytes_received(fleet)
    # All prompts begin differently, so that the prefix cache does not help.
    texts = [f"{n * 'big '}{n} dragons and a story, please." for n in range(1, 13)]
    texts = [f"{chr(ord('A') + n)} {text}" for n, text in enumerate(texts)]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda text: chat(fleet, text, temperature=0), texts))
    block_size = fleet.metric("triolet_kv_block_tokens", pool="decode")
    block_bytes = fleet.metric("triolet_kv_block_bytes", pool="decode")
    prompts = [answer["usage"]["prompt_tokens"] for answer in answers]
    expected = sum(-(-tokens // block_size) * block_bytes for tokens in prompts)
    received = kv_bytes_received(fleet) - before
    assert received == expected
    # One host and one user: all KV went through shared memory.
    for role, counted in (("decode", "received"), ("prefill", "sent")):
        told = f"heartbeats have told that {role} shared all that it {counted}"
        wait_until(
            partial(has_shared_all, fleet, role, counted, before + received), PATIENCE_S, told
        )


def has_shared_all(fleet: FleetProcess, role: str, counted: str, at_least: float) -> bool:
    all_of_it = fleet.metric(f"triolet_kv_bytes_{counted}_total")
    return at_least <= all_of_it == fleet.metric("triolet_kv_bytes_shared_total", role=role)


def test_tokens_and_text_agree_with_what_the_tokenizer_says(fleet: FleetProcess) -> None:
    text = "Once upon a time – 🐉 there was 1 dragon."
    body = {"prompt": text, "add_special_tokens": False}
    ids = fleet.client.post("/tokenize", json=body).json()["tokens"]
    back = fleet.client.post("/detokenize", json={"tokens": ids}).json()
    assert back["prompt"] == text


@pytest.mark.promise
def test_greedy_answers_do_not_depend_on_the_company_they_keep(fleet: FleetProcess) -> None:
    texts = [f"What is {a} + {b}?" for a in (2, 5, 9) for b in (1, 4, 7)]
    alone = [chat(fleet, text, temperature=0)["choices"][0]["message"] for text in texts]
    with ThreadPoolExecutor(len(texts)) as threads:
        answers = list(threads.map(lambda text: chat(fleet, text, temperature=0), texts))
    assert [answer["choices"][0]["message"] for answer in answers] == alone


def test_a_seed_repeats_an_answer(fleet: FleetProcess) -> None:
    first, second = (
        chat(fleet, "Tell me a story.", seed=11, temperature=1.0)["choices"][0]["message"]
        for _ in range(2)
    )
    assert first == second
