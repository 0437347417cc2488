"""Tests that recovery is exact with a real model: when a process dies, KV and logits keep the bits
of an undisturbed run, in fp32 and bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import trio

from server.contract.generation import GenerationRequest
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import open_engine
from triolet.config import AUTO_BACKEND, Dtype, EngineConfig, LocalPrefill, RoutingConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import KIB
from worker.local_engine import LocalEngine

from .house import House, Record, Slot, disturb_at, open_house, read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trio.testing import MockClock

    from worker.engine_port import EnginePort

pytestmark = pytest.mark.slow

NUM_TOKENS = 18
SAMPLINGS = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.9, seed=5, logprobs=0),
    SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.8,
        seed=6,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
    ),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logit_bias=((9, 4.0), (77, -9.0))),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, min_p=0.05, top_k=40, seed=8),
)
OVER_PREFILL = RoutingConfig(LocalPrefill.OFF)
Engines = dict[Role, "Callable[[], EnginePort]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama").path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engines(
    model: Path, dtype: Dtype, pool_bytes: int = 512 * KIB, backend: str = AUTO_BACKEND
) -> Engines:
    """Return what loads an engine for each life of each worker."""
    config = EngineConfig(
        dtype=dtype,
        backend=backend,
        block_size=4,
        kv_pool_bytes=pool_bytes,
        max_num_batched_tokens=16,
    )

    def make() -> EnginePort:
        return LocalEngine(open_engine(model, config))

    return dict.fromkeys((Role.PREFILL, Role.DECODE), make)


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=number.to_bytes(16, "big"),
            prompt_ids=tuple(3 + (7 * i + number) % 250 for i in range(9 + 11 * number)),
            sampling=sampling,
            deadline_s=600.0,
        )
        for number, sampling in enumerate(SAMPLINGS)
    ]


def kill_decode(house: House) -> None:
    house.decodes[0].kill()


def kill_prefill(house: House) -> None:
    house.prefills[0].kill()


def fail_step(house: House) -> None:
    """Let the next step of the busier decode worker raise after it has computed.

    Not of both: a prompt that met one after the other would rightly be taken for the cause.
    """
    _fail_next(max(house.decodes, key=lambda slot: slot.engine.ledger.leased_blocks))


def _fail_next(slot: Slot) -> None:
    engine = slot.engine
    assert isinstance(engine, LocalEngine)
    runner = engine._loaded.runner
    step = runner.step

    def failing(rows: object) -> object:
        step(rows)  # type: ignore[arg-type]
        runner.step = step  # type: ignore[method-assign]
        raise RuntimeError("the device was told to fail")

    runner.step = failing  # type: ignore[assignment,method-assign]


def lose_prefill_and_decode(house: House) -> None:
    """Let no prefill worker come back, and a decode worker die."""
    house.prefills[0].retire()
    house.decodes[0].kill()


CUTS = [(kill_decode, 11), (kill_prefill, 1), (fail_step, 5)]


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_a_client_cannot_tell(model: Path, dtype: Dtype, whole: bool) -> None:
    made = engines(model, dtype)
    expected = _run(made)
    assert all(r.end is not None and r.end[0] == "length" for r in expected)
    assert len({tuple(r.token_ids) for r in expected}) == len(expected)
    # In the short form each disturbs one of the two.
    for disturb, num_tokens in CUTS if whole else CUTS[dtype is Dtype.BFLOAT16 :: 2]:
        assert _run(made, disturb, num_tokens) == expected, (disturb, num_tokens)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_preemption_changes_no_bit(model: Path, dtype: Dtype) -> None:
    expected = _run(engines(model, dtype))
    # Room for the largest of them and little more.
    tight = engines(model, dtype, pool_bytes=(96 if dtype is Dtype.FLOAT32 else 48) * KIB)
    assert _run(tight, decodes=1, cause="preempted") == expected


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("backend", [AUTO_BACKEND, "sdpa"])
def test_who_computes_a_prompt_changes_no_bit(model: Path, dtype: Dtype, backend: str) -> None:
    made = engines(model, dtype, backend=backend)
    expected = _run(made)
    local = RoutingConfig(LocalPrefill.ALWAYS)
    assert _run(made, prefills=0, routing=local) == expected
    assert _run(made, kill_decode, 7, prefills=0, routing=local) == expected


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("backend", [AUTO_BACKEND, "sdpa"])
def test_a_stream_that_changes_the_way_changes_no_bit(
    model: Path, dtype: Dtype, backend: str
) -> None:
    """Prompts go over prefill; it is gone for good when decode dies, and decode computes them."""
    made = engines(model, dtype, backend=backend)
    expected = _run(made)
    rerouted = RoutingConfig(max_local_tokens=0)
    assert _run(made, lose_prefill_and_decode, 7, routing=rerouted) == expected


def _run(
    made: Engines,
    disturb: Callable[[House], None] | None = None,
    num_tokens: int = 0,
    *,
    prefills: int = 1,
    decodes: int = 2,
    cause: str = "",
    routing: RoutingConfig | None = None,
) -> list[Record]:
    # What is disturbed must be there: elsewhere short prompts may not need a prefill worker.
    settings = {"routing": routing or OVER_PREFILL}

    async def run() -> list[Record]:
        async with open_house(prefills, decodes, make_engines=made, **settings) as house:
            async with trio.open_nursery() as nursery:
                if disturb is not None:
                    nursery.start_soon(disturb_at, house, disturb, num_tokens)
                records = await read_all(house, requests())
            is_disturbed = disturb is not None or bool(cause)
            assert bool(house.seen.causes) == is_disturbed, house.seen.causes
            assert not cause or house.seen.causes[cause]
            if house.prefills and house.prefills[0]._is_retired:
                assert house.seen.routes["decode: no_prefill"]
            await house.check_idle()
        return records

    clock: MockClock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(run, clock=clock)
