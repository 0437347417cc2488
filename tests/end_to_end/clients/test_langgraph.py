"""Tests of LangGraph: an agent on models with chat templates without tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ops.models.fetch import is_kept
from ops.models.known import SMOLLM2
from tests.end_to_end.conftest import EAGER, PATIENT
from tests.end_to_end.scripted_model import DEMO, command, write_model
from tests.end_to_end.tool_conversations import LEAKS
from tests.lazily import lazily

from .installed import ADVICE, LOOP, MODEL, QUESTION, get_weather, needed, needed_later

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import openai

    from tests.end_to_end.fleet_process import FleetProcess
else:
    openai = lazily("openai")

needed_later("langgraph")
langchain_openai = needed_later("langchain_openai", "langchain-openai")
pytestmark = pytest.mark.slow

OPTIONS = (
    *PATIENT,
    *EAGER,
    *("--model-name", MODEL),
    *("--set", "server.routing.local_prefill=off"),
)
MAX_STEPS = 12
MAX_TOKENS = 120


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def graph(model: Any, tools: list[Callable[..., Any]], demanded: str) -> Any:  # noqa: ANN401
    """Return an agent: the model, its tools, and the model again until it calls none.

    Args:
      model: model of LangChain.
      tools: functions.
      demanded: tool choice before the first result; afterwards it is `auto`.
    """
    graphs, prebuilt = needed("langgraph.graph"), needed("langgraph.prebuilt")

    def answer(state: Any) -> dict[str, Any]:  # noqa: ANN401
        is_first = not any(message.type == "tool" for message in state["messages"])
        bound = model.bind_tools(tools, tool_choice=demanded if is_first else "auto")
        return {"messages": [bound.invoke(state["messages"])]}

    made = graphs.StateGraph(graphs.MessagesState)
    made.add_node("model", answer)
    made.add_node("tools", prebuilt.ToolNode(tools))
    made.add_edge(graphs.START, "model")
    made.add_conditional_edges("model", prebuilt.tools_condition)
    made.add_edge("tools", "model")
    return made.compile()


def ask(fleet: FleetProcess, demanded: str, **more: Any) -> list[Any]:  # noqa: ANN401
    """Return the messages of an agent after a question, streamed token by token."""
    with openai.DefaultHttpxClient() as connections:
        model = langchain_openai.ChatOpenAI(
            base_url=f"{fleet.url}/v1",
            api_key="none",
            model=MODEL,
            max_retries=0,
            http_client=connections,
            **more,
        )
        agent = graph(model, [get_weather, add], demanded)
        asked = {"messages": [{"role": "user", "content": QUESTION}]}
        config = {"recursion_limit": MAX_STEPS}
        modes = ["messages", "values"]
        said = list(agent.stream(asked, config, stream_mode=modes))
    _, last = said[-1]
    messages: list[Any] = last["messages"]
    shown = "".join(
        one[0].text for mode, one in said if mode == "messages" and one[0].type != "tool"
    )
    assert not any(leak in shown for leak in LEAKS)
    return messages


def test_an_agent_calls_a_tool_of_a_model_whose_template_shows_none(
    start_fleet: Callable[..., FleetProcess], tmp_path: Path
) -> None:
    words = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    directory = write_model(tmp_path / "scripted", LOOP, words["chat_template"])
    fleet = start_fleet(str(directory), *OPTIONS, command=command(directory))
    for demanded in ("auto", "required"):
        question, call, result, advice = ask(fleet, demanded)
        assert (question.text, advice.text) == (QUESTION, ADVICE)
        assert [(one["name"], one["args"]) for one in call.tool_calls] == [
            ("get_weather", {"city": "Rome"})
        ]
        assert not call.text
        assert result.text == get_weather("Rome")


def test_an_agent_on_smollm2_runs_to_its_end(start_fleet: Callable[..., FleetProcess]) -> None:
    if not is_kept(SMOLLM2):
        pytest.skip("SmolLM2 is not on this machine: `triolet serve smollm2` fetches it")
    fleet = start_fleet("smollm2", *OPTIONS, "--kv-pool", "512MiB", "--dtype", "bfloat16")
    messages = ask(fleet, "required", max_completion_tokens=MAX_TOKENS, seed=1)
    results = [message for message in messages if message.type == "tool"]
    assert results
    assert all(result.status == "success" for result in results)
    assert messages[-1].type == "ai"
    assert messages[-1].text
    assert not messages[-1].tool_calls
