"""Tests of a server against its OpenAPI document, with generated requests, valid and invalid.

As a program (`make document`) it starts a server with the demo model, calls every operation, and
reports how many valid requests were refused (0) and how many requests ended in a 5xx (0).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from rich.console import Console
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.end_to_end.fleet_process import running_fleet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MODES: Final = list(schemathesis.GenerationMode)
EXAMPLES: Final = 5
ANSWER_S: Final = 60.0
FEW_TOKENS: Final = 4
"""Maximum tokens of an answer, because the check is about requests."""
STATES: Final = frozenset({401, 403, 404, 429})
"""Refusals about the tenant, missing objects and quantities, not about a request's form."""
PROGRAMS: Final[dict[str, list[Any]]] = {
    "guided_regex": ["[a-c]{1,3}", "x"],
    "regex": ["[a-c]{1,3}", "x"],
    "guided_grammar": ['start: "a" | "b"'],
    "grammar": ['start: "a" | "b"'],
    "guided_json": [{"type": "object"}, '{"type": "integer"}'],
    "json": [{"type": "object"}, '{"type": "integer"}'],
    "schema": [{"type": "object"}, {"enum": [1, 2]}],
    "parameters": [{"type": "object", "properties": {"a": {"type": "integer"}}}],
    "input_schema": [{"type": "object", "properties": {"a": {"type": "integer"}}}],
}
"""Fields that contain programs, in languages that JSON Schema cannot describe, with valid
examples. They replace the document's description of these fields."""
RELATIONS: Final = (
    "context is ",  # the sum of a prompt and its completion
    "min_tokens exceeds max_tokens",
    "must be less than max_tokens",  # a reasoning budget
    "its chat template ignores them",
    "has the same name twice",
    "names a tool that is not in tools",
    "needs a last message from the assistant",
    "template does not show the last message",
    "allowed: equally many, or one",
    "takes at most ",  # an input, in tokens
)
"""Rules that the document states in prose because JSON Schema cannot express them, as parts of
error messages."""


@dataclass
class Tally:
    """The results of a check.

    Attributes:
      asked: number of requests by operation.
      refused: refused valid requests, by operation and error message.
      by_relation: requests that only prose forbids, by the entry of RELATIONS.
      faults: everything else that contradicts the document.
      num_5xx: number of these that are server errors.
    """

    asked: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    by_relation: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_5xx: int = 0


def parts_of(value: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Yield every object in a document."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from parts_of(part)


def with_programs(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with the examples of PROGRAMS in place of its programs."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    for part in parts_of(copy["components"]["schemas"]):
        fields = part.get("properties", {})
        for name, values in PROGRAMS.items():
            if isinstance(fields.get(name), dict) and (
                "anyOf" in fields[name] or "type" in fields[name]
            ):
                may_be_null = {"type": "null"} in fields[name].get("anyOf", ())
                is_text = fields[name].get("type") == "string"
                if not is_text:
                    fields[name] = {"enum": [*values, *([None] if may_be_null else [])]}
    return copy


def shorten(body: Any) -> None:  # noqa: ANN401
    """Limit the answer's length without making the request invalid."""
    if not isinstance(body, dict):
        return
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if isinstance(body.get(name), int) and body[name] > FEW_TOKENS:
            body[name] = FEW_TOKENS
    if isinstance(options := body.get("options"), dict) and "num_predict" in options:
        options["num_predict"] = FEW_TOKENS


def settings_for(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def ask_all(
    document: dict[str, Any],
    url: str,
    checks: list[Any] = CHECKS,
    *,
    examples: int = EXAMPLES,
    only: str = "",
) -> Tally:
    """Call every operation of a document with valid and invalid requests.

    Args:
      document: the OpenAPI document.
      url: the server's URL.
      checks: checks for every answer.
      examples: requests of each kind per operation.
      only: part of the names of the operations to call.
    """
    tally = Tally()
    for result in schemathesis.openapi.from_dict(with_programs(document)).get_all_operations():
        operation = result.ok()
        if only not in operation.label:
            continue
        tally.asked[operation.label] += 0
        for mode in MODES:
            if mode.is_negative and not operation.body:
                continue  # any path is a string
            strategy = operation.as_strategy(generation_mode=mode)

            @settings_for(examples)
            @given(case=strategy)
            def ask(case: Any) -> None:  # noqa: ANN401
                shorten(case.body)
                response = case.call(base_url=url, timeout=ANSWER_S)
                tally.asked[case.operation.label] += 1
                judge(case, response, checks, tally)

            ask()
    return tally


def judge(case: Any, response: Any, checks: list[Any], tally: Tally) -> None:  # noqa: ANN401
    """Record what contradicts the document."""
    label, status = case.operation.label, response.status_code
    named = {str(one) for one in case.operation.definition.raw["responses"]}
    if str(status) in named and status >= 500:
        return  # the document states that this is always the answer
    try:
        case.validate_response(response, checks=checks)
    except AssertionError as error:
        tally.faults.append(f"{label}: {error}")
        tally.num_5xx += status >= 500
    is_allowed = case.meta.generation.mode.is_positive
    if is_allowed and 400 <= status < 500 and status not in STATES:
        said = response.text
        relation = next((part for part in RELATIONS if part in said), None)
        if relation is not None:
            tally.by_relation[relation] += 1
        else:
            tally.refused[f"{label}: {status} {said[:300]} of {json.dumps(case.body)[:500]}"] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a fleet with the demo model; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.document", description=__doc__)
    parser.add_argument(
        "--examples", type=int, default=50, help="requests of each kind per operation"
    )
    parser.add_argument("--only", default="", help="check only operations with this in their names")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    with (
        TemporaryDirectory() as folder,
        running_fleet(Path(folder) / "fleet.log", "--batch-dir", folder) as fleet,
    ):
        document = fleet.client.get("/openapi.json").json()
        tally = ask_all(document, fleet.url, examples=options.examples, only=options.only)
    for said, count in tally.refused.most_common():
        console.print(f"refused {count}: {said}", markup=False)
    for fault in tally.faults:
        console.print(fault, markup=False)
    for relation, count in tally.by_relation.most_common():
        console.print(
            f"{count} refused by a rule that the document states in prose: {relation}", markup=False
        )
    console.print(
        f"{tally.asked.total()} requests to {len(tally.asked)} operations: "
        f"{tally.refused.total()} refused that the document allows, {len(tally.faults)} answers "
        f"that are not as it says, of these {tally.num_5xx} with a 5xx"
    )
    return int(bool(tally.refused or tally.faults))


if __name__ == "__main__":
    sys.exit(main())
