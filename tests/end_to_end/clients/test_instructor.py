"""Tests of instructor in five modes: tools, JSON and schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, field_validator

from tests.end_to_end.scripted_model import Rule, tool_call
from tests.lazily import lazily

from .installed import MODEL, needed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import openai

    from tests.end_to_end.fleet_process import FleetProcess
else:
    openai = lazily("openai")

instructor = needed("instructor")
pytestmark = pytest.mark.slow

QUESTION = "Ada is 36 years old."
ADA = {"name": "Ada", "age": 36}
AS_JSON = json.dumps(ADA)
AS_CALL = tool_call("Person", **ADA)


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


class City(BaseModel):
    """A place."""

    name: str


@pytest.fixture
def opened(script: Callable[..., FleetProcess]) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a client in a mode, with a script."""
    clients: list[openai.OpenAI] = []

    def open_client(mode: str, *rules: Rule) -> Any:  # noqa: ANN401
        fleet = script(*rules)
        clients.append(openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0))
        return instructor.from_openai(clients[-1], mode=instructor.Mode[mode])

    yield open_client
    for client in clients:
        client.close()


def ask(client: Any, kind: Any, **more: Any) -> Any:  # noqa: ANN401
    return client.chat.completions.create(
        model=MODEL,
        response_model=kind,
        messages=[{"role": "user", "content": QUESTION}],
        **{"max_retries": 0, **more},
    )


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("TOOLS", AS_CALL),
        ("JSON", AS_JSON),
        ("MD_JSON", f"```json\n{AS_JSON}\n```"),
        ("JSON_SCHEMA", AS_JSON),
    ],
)
def test_an_object_is_taken_out_of_a_sentence(
    opened: Callable[..., Any], mode: str, says: str
) -> None:
    assert ask(opened(mode, Rule("", says)), Person).model_dump() == ADA


def test_several_tools_are_called_at_once(opened: Callable[..., Any]) -> None:
    says = f"{AS_CALL}\n{tool_call('City', name='London')}"
    found = ask(opened("PARALLEL_TOOLS", Rule(QUESTION, says)), Iterable[Person | City])
    assert [(type(one), one.model_dump()) for one in found] == [
        (Person, ADA),
        (City, {"name": "London"}),
    ]


@pytest.mark.parametrize(
    ("mode", "says"),
    [("TOOLS", tool_call("PartialPerson", **ADA)), ("JSON_SCHEMA", AS_JSON)],
)
def test_an_object_is_streamed(opened: Callable[..., Any], mode: str, says: str) -> None:
    client = opened(mode, Rule("", says))
    *_, last = client.chat.completions.create_partial(
        model=MODEL,
        response_model=Person,
        messages=[{"role": "user", "content": QUESTION}],
        max_retries=0,
    )
    assert (last.name, last.age) == ("Ada", 36)


def test_a_failed_validation_is_told_to_the_model(opened: Callable[..., Any]) -> None:
    class Elder(Person):
        """Somebody with years behind them."""

        @field_validator("age")
        @classmethod
        def is_old(cls, age: int) -> int:
            if age < 60:
                raise ValueError("not old enough")
            return age

    rules = (
        Rule("not old enough", tool_call("Elder", name="Ada", age=63), shown=(QUESTION,)),
        Rule(QUESTION, tool_call("Elder", **ADA)),
    )
    assert ask(opened("TOOLS", *rules), Elder, max_retries=2).age == 63
