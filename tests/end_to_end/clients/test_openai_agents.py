"""Tests of OpenAI's Agents SDK over chat completions and Responses: tools, streams, handoffs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.lazily import lazily

from .installed import ADVICE, LOOP, MODEL, QUESTION, get_weather, needed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import openai

    from tests.end_to_end.fleet_process import FleetProcess
else:
    openai = lazily("openai")

agents = needed("agents", "openai-agents")
pytestmark = pytest.mark.slow
agents.set_tracing_disabled(True)

KINDS = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")


def run(fleet: FleetProcess, kind: str, use: Callable[[Any], Awaitable[Any]]) -> Any:  # noqa: ANN401
    """Run a function with a model of the SDK and return its result."""

    async def opened() -> Any:  # noqa: ANN401
        async with openai.AsyncOpenAI(
            base_url=f"{fleet.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await use(getattr(agents, kind)(model=MODEL, openai_client=client))

    return asyncio.run(opened())


def weather_agent(model: Any, **more: Any) -> Any:  # noqa: ANN401
    tools = [agents.function_tool(get_weather)]
    return agents.Agent(name="Weather desk", model=model, tools=tools, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_calls_its_tool(script: Callable[..., FleetProcess], kind: str) -> None:
    async def use(model: Any) -> Any:  # noqa: ANN401
        return await agents.Runner.run(weather_agent(model), QUESTION)

    result = run(script(*LOOP), kind, use)
    assert result.final_output == ADVICE
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_streams(script: Callable[..., FleetProcess], kind: str) -> None:
    async def use(model: Any) -> tuple[str, Any]:  # noqa: ANN401
        text = ""
        result = agents.Runner.run_streamed(weather_agent(model), QUESTION)
        async for event in result.stream_events():
            raw = event.data if event.type == "raw_response_event" else None
            if raw is not None and raw.type == "response.output_text.delta":
                text += raw.delta
        return text, result.final_output

    assert run(script(*LOOP), kind, use) == (ADVICE, ADVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_hands_over_to_another(script: Callable[..., FleetProcess], kind: str) -> None:
    async def use(model: Any) -> Any:  # noqa: ANN401
        desk = weather_agent(model, instructions="You know the weather.")
        triage = agents.Agent(
            name="Triage", model=model, instructions="You hand over.", handoffs=[desk]
        )
        return await agents.Runner.run(triage, QUESTION)

    handed_over = tool_call("get_weather", city="Rome")
    rules = (
        *LOOP[:1],
        Rule("Weather desk", handed_over, shown=("You know the weather.",)),
        Rule(QUESTION, tool_call("transfer_to_weather_desk"), shown=("You hand over.",)),
    )
    result = run(script(*rules), kind, use)
    assert result.final_output == ADVICE
    assert result.last_agent.name == "Weather desk"


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_has_the_whole_history(
    script: Callable[..., FleetProcess], kind: str
) -> None:
    async def use(model: Any) -> Any:  # noqa: ANN401
        desk = weather_agent(model)
        first = await agents.Runner.run(desk, QUESTION)
        turns = [*first.to_input_list(), {"role": "user", "content": "And a coat?"}]
        return await agents.Runner.run(desk, turns)

    rules = (Rule("And a coat?", "No coat.", shown=(QUESTION, ADVICE)), *LOOP)
    assert run(script(*rules), kind, use).final_output == "No coat."
