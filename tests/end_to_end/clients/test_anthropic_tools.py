"""Tests of the tool runner in Anthropic's official client against a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.lazily import lazily

from .installed import ADVICE, LOOP, MODEL, QUESTION, SUNNY, get_weather

if TYPE_CHECKING:
    from collections.abc import Callable

    import anthropic

    from tests.end_to_end.fleet_process import FleetProcess
else:
    anthropic = lazily("anthropic")

pytestmark = pytest.mark.slow

ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": QUESTION}],
}


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_calls_its_tool_and_gives_the_advice(
    script: Callable[..., FleetProcess], stream: bool
) -> None:
    fleet = script(*LOOP)
    cities: list[str] = []

    @anthropic.beta_tool
    def get_weather_(city: str) -> str:
        """Tell the weather of a city."""
        cities.append(city)
        return SUNNY

    get_weather_.name = "get_weather"
    with anthropic.Anthropic(base_url=fleet.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(**ASKED, tools=[get_weather_], stream=stream)
        final = runner.until_done()
    assert cities == ["Rome"]
    assert final.stop_reason == "end_turn"
    assert [block.text for block in final.content if block.type == "text"] == [ADVICE]


def test_thinking_blocks_of_another_model_are_taken(script: Callable[..., FleetProcess]) -> None:
    fleet = script(*LOOP)
    called = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    thought = {"type": "thinking", "thinking": "I look it up.", "signature": "c2ln"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": get_weather("Rome")}
    turns: list[Any] = [
        *ASKED["messages"],
        {"role": "assistant", "content": [thought, called]},
        {"role": "user", "content": [result]},
    ]
    with anthropic.Anthropic(base_url=fleet.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(**{**ASKED, "messages": turns})
    assert [block.text for block in answer.content if block.type == "text"] == [ADVICE]
