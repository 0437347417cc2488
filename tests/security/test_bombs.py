"""Tests of small requests that demand much work: the cost is known before anything is allocated."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.json_body import parse_object
from server.api.schemas import (
    MAX_STOP_STRINGS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read_request,
)
from tests.server.support.fakes import FakeFleet, by_hand
from tests.server.support.surface import surface
from triolet.errors import RequestError
from triolet.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

HI: Final = [{"role": "user", "content": "hi"}]
KINDS: Final = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
BOMBS: Final[list[dict[str, Any]]] = [
    {"n": 10**9},
    {"n": 2**200},
    {"best_of": 10**9},
    {"logprobs": 10**9},
    {"top_logprobs": 10**9},
    {"max_tokens": 2**63},
    {"min_tokens": 2**63},
    {"seed": 2**200},
    {"seed": -(2**200)},
    {"top_k": 2**200},
    {"priority": 2**200},
    {"stop": ["x" * 64] * 10_000},
    {"stop": "x" * 1_000_000},
    {"stop_token_ids": list(range(100_000))},
    {"logit_bias": {str(token): 1 for token in range(MAX_LOGIT_BIAS + 1)}},
    {"logit_bias": {"9" * 100_000: 1}},
    {"logit_bias": {"1": 1e308}},
    {"tools": [{"type": "function"}] * 10_000},
    {"metadata": {"k": "v" * 1_000_000}},
    {"messages": HI * 10_000},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]},
    {"prompt": [[1]] * 10_000},
    {"prompt": ["x"] * 10_000},
    {"x" * 1_000_000: 1},
    {f"k{index}": 1 for index in range(1000)},
]
SCALARS: Final = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
ANYTHING: Final = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
NAMES: Final = sorted({name for kind in KINDS for name in kind.model_fields})


def refusal_of(kind: Any, body: dict[str, Any]) -> RequestError | None:  # noqa: ANN401
    try:
        read_request(kind, body)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: json.dumps(bomb)[:40])
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_request_costs_no_more_memory_than_it_has_bytes(kind: Any, bomb: Any) -> None:  # noqa: ANN401
    body = {"messages": HI} if kind is ChatRequest else {"prompt": "hi"}
    raw = json.dumps(body | bomb).encode()
    parse_object(raw)  # one-time initialization is not part of a request's cost
    tracemalloc.start()
    try:
        parsed = parse_object(raw)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        refused = refusal_of(kind, parsed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Its own data may be copied a few times, which its size bounds.
    assert peak - held < MIB + 8 * len(raw)
    if refused is not None:
        assert refused.status == 400
        assert len(refused.message) < 1000
        assert len(refused.param or "") <= 200


@pytest.mark.parametrize(
    ("name", "most", "of_size"),
    [
        ("logit_bias", MAX_LOGIT_BIAS, lambda size: dict.fromkeys(map(str, range(size)), 1)),
        ("stop", MAX_STOP_STRINGS, lambda size: ["x"] * size),
        ("stop_token_ids", MAX_STOP_TOKEN_IDS, lambda size: list(range(size))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_as_many_as_the_bound_are_taken_and_one_more_is_refused(
    kind: Any,  # noqa: ANN401
    name: str,
    most: int,
    of_size: Callable[[int], Any],
) -> None:
    body: dict[str, Any] = {"messages": HI} if kind is ChatRequest else {"prompt": "hi"}
    assert refusal_of(kind, body | {name: of_size(most)}) is None
    refused = refusal_of(kind, body | {name: of_size(most + 1)})
    assert refused is not None
    assert (refused.status, refused.param) == (400, name)


@settings(max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), ANYTHING, max_size=6),
)
def test_any_json_is_a_request_or_a_400(kind: Any, body: dict[str, Any]) -> None:  # noqa: ANN401
    refused = refusal_of(kind, body)
    assert refused is None or (refused.status == 400 and refused.message)


@pytest.mark.slow
async def test_bombs_reach_no_worker() -> None:
    async with surface(FakeFleet(by_hand)) as server:
        for bomb in BOMBS:
            for path, body in (
                ("/v1/chat/completions", {"messages": HI}),
                ("/v1/completions", {"prompt": "hi"}),
            ):
                if set(bomb) <= {"metadata"}:
                    continue  # harmless to anyone but its sender
                answer = await server.post(path, body | bomb)
                assert answer.status == 400, (path, str(bomb)[:80], answer.status)
        assert server.fleet.generations == []
