"""The fields by which a client offers tools, and those by which it tells what came of calling them.

Knows names and types; the form is OpenAI's.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from .fields import StrictFields

MAX_TOOLS: Final = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(StrictFields):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictFields):
    """A tool; there are no others but functions."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictFields):
    """A function, by its name."""

    name: ToolName


class NamedTool(StrictFields):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(StrictFields):
    """What the model has called: arguments are JSON in a string."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str


class ToolCall(StrictFields):
    """A call in an earlier turn of the model's."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFields(StrictFields):
    """Tools and how they are to be used."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
