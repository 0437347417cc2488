"""Tests of structured output and tool calls with the official client against a real fleet."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import jsonschema
import pytest

from loadtest.schemas import costly, random_schema
from tests.lazily import lazily

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai

    from .fleet_process import FleetProcess
else:
    openai = lazily("openai")

pytestmark = pytest.mark.slow

NUM_SCHEMAS = 8
NUM_OBJECTS, NUM_OBJECTS_WHOLE = 4, 10
"""Number of seeds; open-ended objects are cut at 500 tokens."""
LOST: Final = "triolet_workers_lost_total"
QUARANTINED: Final = "triolet_grammars_quarantined_total"
ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 1,
    "seed": 3,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(fleet: FleetProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.promise
def test_answers_keep_to_their_schemas(client: openai.OpenAI) -> None:
    def check(seed: int) -> str:
        schema = random_schema(seed)
        form = {"name": "a", "schema": schema, "strict": True}
        answer = client.chat.completions.create(
            **ASK, response_format={"type": "json_schema", "json_schema": form}
        )
        choice = answer.choices[0]
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), schema)
        return str(choice.finish_reason)

    with ThreadPoolExecutor(4) as threads:
        reasons = list(threads.map(check, range(NUM_SCHEMAS)))
    # Seeds determine the answers, so none of these is cut by chance.
    assert reasons.count("stop") > NUM_SCHEMAS // 2


@pytest.mark.proof
def test_objects_end_where_their_schema_lists_keys_and_does_not_close_them(
    client: openai.OpenAI, whole: bool
) -> None:
    num_objects = NUM_OBJECTS_WHOLE if whole else NUM_OBJECTS
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "pet": {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}},
        },
        "required": ["name", "age", "pet"],
    }

    def keys(seed: int) -> list[str]:
        asked = ASK | {"seed": seed, "max_tokens": 500}
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        choice = client.chat.completions.create(**asked, response_format=form).choices[0]
        assert choice.finish_reason == "stop", choice.message.content
        answer = json.loads(choice.message.content or "")
        jsonschema.validate(answer, schema)
        return list(answer)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(keys, range(num_objects)))
    assert found == [["name", "age", "pet"]] * num_objects


def test_the_same_seed_keeps_to_a_regex_in_the_same_words(client: openai.OpenAI) -> None:
    wanted = {"structured_outputs": {"regex": "[a-z]{4,9}@[a-z]{3}"}, "max_tokens": 50}
    texts = [
        client.completions.create(model="demo", prompt="Mail:", seed=5, extra_body=wanted)
        .choices[0]
        .text
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert re.fullmatch("[a-z]{4,9}@[a-z]{3}", texts[0])


def test_each_of_several_choices_keeps_to_the_grammar_in_the_words_of_its_seed(
    client: openai.OpenAI,
) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 50,
        "temperature": 1,
        "extra_body": {"guided_regex": "[a-z]{4,9}@[a-z]{3}"},
    }
    prompts = ["Mail:", "Write to:"]
    together = client.completions.create(prompt=prompts, n=3, seed=5, **asked).choices
    alone = [
        client.completions.create(prompt=prompt, seed=5 + index, **asked).choices[0].text
        for prompt in prompts
        for index in range(3)
    ]
    texts = [choice.text for choice in together]
    assert texts == alone
    assert len(set(texts)) == len(texts)
    assert all(re.fullmatch("[a-z]{4,9}@[a-z]{3}", text) for text in texts)


def test_a_grammar_that_cannot_be_used_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, extra_body={"guided_regex": "(a"})
    assert caught.value.param == "guided_regex"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_tools_that_have_to_be_called_are(client: openai.OpenAI, choice: Any) -> None:  # noqa: ANN401
    asked = ASK | {
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    calls = whole.message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [d for chunk in chunks for d in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
    assert deltas[0].function.name == "weather"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_has_to_call_tools_repeats_no_call(
    client: openai.OpenAI, temperature: float
) -> None:
    asked = ASK | {
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 400,
        "temperature": temperature,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    told = [
        (call.function.name, call.function.arguments)
        for call in whole.message.tool_calls or ()
        if call.type == "function"
    ]
    assert told
    assert len(set(told)) == len(told)
    assert temperature or whole.finish_reason == "tool_calls"


# Another test sends the same grammars to this fleet, which may have quarantined them.
COSTLY = {
    name: {"guided_grammar": body["guided_grammar"] + "// of this test\n"}
    for name, body in costly().items()
    if "guided_grammar" in body
}


def test_grammars_that_cost_more_with_every_token_cost_no_neighbour_anything(
    fleet: FleetProcess, client: openai.OpenAI
) -> None:
    story: dict[str, Any] = ASK | {"temperature": 0, "max_tokens": 500}

    def told() -> str:
        chunks = client.chat.completions.create(**story, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def refused(name: str) -> tuple[str | None, str | None]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                **ASK | {"max_tokens": 200}, extra_body=COSTLY[name] | {"min_tokens": 150}
            )
        return caught.value.code, caught.value.param

    alone, lost, before = told(), fleet.metric(LOST), fleet.metric(QUARANTINED)
    with ThreadPoolExecutor(4) as threads:
        beside = threads.submit(told)
        at_once = threads.submit(refused, "ambiguous")
        later = threads.submit(refused, "ambiguous after 64 digits")
        assert at_once.result() == ("invalid_request_error", "guided_grammar")
        assert later.result() == ("grammar_too_costly", None)
        assert beside.result() == alone
    assert refused("ambiguous after 64 digits") == ("grammar_too_costly", None)
    assert fleet.metric(QUARANTINED) - before == 1
    assert fleet.metric(LOST) == lost
