"""Tests that a client sees no difference when any process dies: ids, text, logprobs, usage and end
are those of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import pytest
import trio

from server.contract.generation import GenerationRequest
from simulation.engine import ScriptedEngine
from triolet.sampling import SamplingParams
from triolet.service_class import Scheduling

from .house import House, Record, open_house, read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

pytestmark = pytest.mark.slow

KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    # Name: sampling, and what the server does with the text.
    "greedy": ({"temperature": 0.0}, {}),
    "stop string": ({"temperature": 0.0, "max_tokens": 150}, {"stop": ("日本 hört «es»",)}),
    "stop string shown": (
        {"temperature": 0.0, "max_tokens": 150},
        {"stop": ("🚂 und",), "include_stop": True},
    ),
    "penalties": (
        {
            "temperature": 0.0,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.2,
        },
        {},
    ),
    "logit bias": ({"temperature": 0.0, "logit_bias": ((ord("e"), -100.0),)}, {}),
    "sampled": ({"temperature": 0.9, "seed": 77}, {}),
    "logprobs": ({"temperature": 0.7, "logprobs": 4}, {}),
    "stop token": ({"temperature": 0.0, "stop_token_ids": (ord("r"),), "min_tokens": 30}, {}),
}


def requests() -> list[GenerationRequest]:
    """Return one request of each kind; their prompts take several prefill steps."""
    made = []
    for number, (sampling, rest) in enumerate(KINDS.values()):
        params = SamplingParams(**{"max_tokens": 70, "seed": number, **sampling})  # type: ignore[arg-type]
        prompt = tuple(f"{number}: Erzähl mir von Zügen.".encode())
        made.append(
            GenerationRequest(
                request_id=number.to_bytes(16, "big"),
                prompt_ids=prompt,
                sampling=params,
                deadline_s=600.0,
                **rest,  # type: ignore[arg-type]
            )
        )
    return made


async def undisturbed() -> list[Record]:
    """Return what nothing disturbs."""
    async with open_house() as house:
        records = await read_all(house, requests())
        assert not house.seen.causes
        await house.check_idle()
    return records


async def decode_dies(house: House) -> None:
    house.decodes[0].kill()


async def both_decodes_die(house: House) -> None:
    for slot in house.decodes:
        slot.kill()


async def prefill_dies(house: House) -> None:
    house.prefills[0].kill()


async def decode_drains(house: House) -> None:
    house.decodes[0].shell.drain(0.0)
    await trio.sleep(0.2)
    house.decodes[0].kill()


async def decode_step_fails(house: House) -> None:
    engine = house.decodes[0].engine
    assert isinstance(engine, ScriptedEngine)
    engine.fail_steps = 1


async def prefill_step_fails(house: House) -> None:
    engine = house.prefills[0].engine
    assert isinstance(engine, ScriptedEngine)
    engine.fail_steps = 1


async def part(house: House, address: str | None, seconds: float = 3.0) -> None:
    assert address is not None
    house.network.cut_all(address)
    await trio.sleep(seconds)
    house.network.heal_all(address)


async def server_and_decode_are_parted(house: House) -> None:
    await part(house, house.decodes[0].config.control_address)


async def server_and_prefill_are_parted(house: House) -> None:
    await part(house, house.prefills[0].config.control_address)


async def prefill_and_decode_are_parted(house: House) -> None:
    await part(house, house.decodes[0].config.kv_address, 4.0)


DISTURBANCES: dict[Callable[[House], Awaitable[None]], tuple[str, tuple[int, ...]]] = {
    # What is done, by which cause attempts fail then, and after how many tokens of a stream.
    decode_dies: ("decode_lost", (1, 6, 17, 33, 52)),
    both_decodes_die: ("decode_lost", (11,)),
    prefill_dies: ("prefill_lost", (1, 3)),
    decode_drains: ("drain", (7, 30)),
    decode_step_fails: ("error", (2, 23, 41)),
    prefill_step_fails: ("prefill_error", (1, 4)),
    server_and_decode_are_parted: ("decode_lost", (13,)),
    server_and_prefill_are_parted: ("prefill_lost", (0,)),
    prefill_and_decode_are_parted: ("prefill_peer_lost", (1,)),
}


@pytest.fixture(scope="module")
def expected() -> list[Record]:
    return trio.run(undisturbed, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_reference_shows_what_it_is_for(expected: list[Record]) -> None:
    by_kind = dict(zip(KINDS, expected, strict=True))
    ends = {kind: record.end and record.end[:2] for kind, record in by_kind.items()}
    assert ends["stop string"] == ("stop", "日本 hört «es»")
    assert ends["stop string shown"] == ("stop", "🚂 und")
    assert ends["stop token"] == ("stop", None)
    assert ends["greedy"] == ends["penalties"] == ("length", None)
    assert by_kind["stop string shown"].text.endswith("🚂 und")
    assert "e" not in by_kind["logit bias"].text
    logprobs = by_kind["logprobs"].logprobs
    assert [p.token_id for p in logprobs] == by_kind["logprobs"].token_ids
    assert all(len(p.top) == 4 for p in logprobs)
    assert not any("#" in record.text for record in expected), "KV was wrong"


@pytest.mark.parametrize(
    ("prefills", "disturb", "cause", "num_tokens"),
    [
        *((1, how, cause, n) for how, (cause, cuts) in DISTURBANCES.items() for n in cuts),
        # Decode computes prompts.
        (0, decode_dies, "decode_lost", 0),
        (0, decode_dies, "decode_lost", 17),
        (0, both_decodes_die, "decode_lost", 11),
        (0, decode_drains, "drain", 7),
        (0, decode_step_fails, "error", 2),
        (0, server_and_decode_are_parted, "decode_lost", 13),
    ],
)
async def test_a_client_cannot_tell(
    prefills: int,
    disturb: Callable[[House], Awaitable[None]],
    cause: str,
    num_tokens: int,
    expected: list[Record],
    autojump_clock: MockClock,
) -> None:
    async with open_house(prefills=prefills) as house:

        async def disturb_in_time() -> None:
            if num_tokens:
                await house.until(
                    lambda: any(len(r.token_ids) >= num_tokens for r in house.records.values())
                )
            await disturb(house)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb_in_time)
            records = await read_all(house, requests())
        assert house.seen.causes[cause], f"nothing was disturbed: {house.seen.causes}"
        if not prefills:
            assert set(house.seen.routes) == {"decode: no_prefill"}
        assert records == expected
        await house.check_idle()


async def test_prompts_go_to_decode_while_prefill_is_gone(
    expected: list[Record], autojump_clock: MockClock
) -> None:
    async with open_house() as house:
        house.prefills[0].retire()
        records = await read_all(house, requests())
        assert house.seen.routes["decode: no_prefill"] == len(KINDS)
        assert records == expected
        await house.check_idle()


@pytest.mark.parametrize(("num_blocks", "num_tenants"), [(70, 1), (46, 1), (46, 3)])
async def test_a_pool_that_is_smaller_than_all_of_them_together_preempts_and_never_jams(
    num_blocks: int, num_tenants: int, expected: list[Record], autojump_clock: MockClock
) -> None:
    tenants = [Scheduling(f"t{n}", weight=2.0**n) for n in range(num_tenants)]
    async with open_house(decodes=1, num_blocks=num_blocks) as house:
        theirs = zip(requests(), cycle(tenants), strict=False)
        records = await read_all(
            house, [replace(one, scheduling=scheduling) for one, scheduling in theirs]
        )
        assert house.seen.causes["preempted"]
        assert set(house.seen.causes) <= {"preempted", "refused_no_blocks", "refused_no_rows"}
        assert records == expected
        await house.check_idle()
