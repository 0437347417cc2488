"""Tests of the chat page's JavaScript modules without the page: answer states, input, figures,
back-off and error texts.

The modules run in Chromium.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .fake_server import FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def evaluate(browser: Browser, port: int) -> Iterator[Callable[..., Any]]:
    """Call a function of JavaScript with all modules as `m` and one argument."""
    server = FakeServer(port)
    page = browser.new_page()
    page.goto(server.url)
    imports = "Object.assign({}, ...(await Promise.all(%s.map((n) => import(`/static/${n}.js`)))))"
    names = ["answer", "connection", "conversation", "errors", "stats"]

    def call(function: str, argument: object = None) -> Any:  # noqa: ANN401
        body = f"async (x) => {{ const m = {imports % names}; return ({function})(m, x); }}"
        return page.evaluate(body, argument)

    yield call
    page.close()
    server.stop()


STEPS = {
    "text": '(a) => a.receive({type: "response.output_text.delta", delta: "x"}, 1)',
    "complete": '(a) => a.receive({type: "response.completed", response: {}}, 1)',
    "stop": "(a) => a.stop()",
    "fail": "(a) => a.fail({})",
}
REACH = {
    "waiting": (),
    "streaming": ("text",),
    "done": ("complete",),
    "stopped": ("stop",),
    "failed": ("fail",),
}
ROWS = {
    ("waiting", "text"): "streaming",
    ("waiting", "complete"): "done",
    ("waiting", "stop"): "stopped",
    ("waiting", "fail"): "failed",
    ("streaming", "text"): "streaming",
    ("streaming", "complete"): "done",
    ("streaming", "stop"): "stopped",
    ("streaming", "fail"): "failed",
}


def test_every_state_of_an_answer_takes_its_events_or_refuses_unchanged(
    evaluate: Callable[..., Any],
) -> None:
    cells = [[state, event] for state in REACH for event in STEPS]
    steps = ", ".join(f"{name}: {step}" for name, step in STEPS.items())
    outcomes = evaluate(
        f"""(m, {{cells, reach}}) => cells.map(([state, event]) => {{
          const steps = {{{steps}}};
          const answer = new m.Answer();
          answer.sent("lane", 0);
          reach[state].forEach((name) => steps[name](answer));
          const before = answer.text;
          try {{ steps[event](answer); return [answer.state, false]; }}
          catch {{ return [answer.state, answer.text === before]; }}
        }})""",
        {"cells": cells, "reach": REACH},
    )
    for (state, event), (after, refused_unchanged) in zip(cells, outcomes, strict=True):
        expected = ROWS.get((state, event))
        assert after == (expected or state), (state, event)
        assert refused_unchanged == (expected is None), (state, event)


def test_every_answer_can_end_and_an_ended_one_is_over(evaluate: Callable[..., Any]) -> None:
    table = evaluate("(m) => m.TRANSITIONS")
    assert set(table) == set(REACH)
    for state, row in table.items():
        assert not row or {"stop", "fail"} <= set(row), state


def test_a_terminal_event_is_known_as_one(evaluate: Callable[..., Any]) -> None:
    kinds = ["completed", "incomplete", "failed", "created", "in_progress", "output_text.delta"]
    ends = evaluate(
        "(m, kinds) => kinds.map((k) => m.endsResponse({type: `response.${k}`}))", kinds
    )
    assert ends == [True, True, True, False, False, False]
    assert evaluate('(m) => m.endsResponse({type: "error"})')


def test_the_back_off_grows_and_is_bounded(evaluate: Callable[..., Any]) -> None:
    delays = "(m, random) => Array.from({length: 40}, (_, n) => m.backoffMs(n, random))"
    shortest, longest = evaluate(delays, 0), evaluate(delays, 1)
    assert shortest[0] == 200
    assert longest[0] == 400
    assert longest == sorted(longest)
    assert max(longest) == 10_000
    assert min(shortest) > 0


@pytest.mark.parametrize(
    ("pieces", "end", "ttft", "rate", "tokens"),
    [
        pytest.param([], None, None, None, 0, id="nothing yet"),
        pytest.param([150], None, 50, None, 1, id="one piece has no rate"),
        pytest.param([150, 250, 350], None, 50, 10, 3, id="pieces stand for tokens"),
        pytest.param([150, 250], (650, 11), 50, 20, 11, id="the server's count wins"),
        pytest.param([150, 151], (152, 11), 50, None, 11, id="too short to measure"),
        pytest.param([], (650, 0), None, None, 0, id="an empty answer"),
        pytest.param([150, 350], (650, None), 50, 5, 2, id="ended without a count"),
    ],
)
def test_figures(
    evaluate: Callable[..., Any],
    pieces: list[int],
    end: tuple[int, int | None] | None,
    ttft: int | None,
    rate: float | None,
    tokens: int,
) -> None:
    figures = evaluate(
        """(m, {pieces, end}) => {
          const meter = new m.Meter(100);
          pieces.forEach((at) => meter.piece(at));
          if (end) meter.end(end[0], {output_tokens: end[1] ?? undefined});
          return [meter.ttftMs, meter.tokensPerSecond, meter.tokens, meter.isExact];
        }""",
        {"pieces": pieces, "end": end},
    )
    assert figures == [ttft, rate, tokens, end is not None and end[1] is not None]


def test_the_input_leaves_out_turns_without_an_answer(evaluate: Callable[..., Any]) -> None:
    said = evaluate(
        """(m, turns) => {
          const conversation = new m.Conversation({id: "1"});
          for (const [question, text] of turns) conversation.add(question, 1).answer = {text};
          conversation.add("last", 2);
          return conversation.input().map(({role, content}) => [role, content]);
        }""",
        [["one", "1"], ["two", ""], ["three", "3"]],
    )
    assert said == [
        ["user", "one"],
        ["assistant", "1"],
        ["user", "three"],
        ["assistant", "3"],
        ["user", "last"],
    ]


@pytest.mark.parametrize(
    ("error", "title", "remedy"),
    [
        ({"code": "overloaded"}, "The server is busy.", "retry"),
        ({"code": "draining"}, "The server is about to restart.", "retry"),
        ({"code": "no_worker"}, "The model is not available right now.", "retry"),
        ({"code": "deadline_exceeded"}, "The answer took too long.", "retry"),
        ({"code": "rate_limit_exceeded"}, "Too many questions in a short time.", "retry"),
        ({"code": "insufficient_quota"}, "The quota is used up.", "none"),
        (
            {"code": "context_length_exceeded"},
            "This chat is too long for the model.",
            "new-chat",
        ),
        ({"code": "new", "status": 503}, "The server is busy.", "retry"),
        ({"code": "new", "status": 502}, "Something went wrong on the server.", "retry"),
        ({"code": "new", "status": 413}, "This chat is too long for the model.", "new-chat"),
    ],
)
def test_errors_are_explained(
    evaluate: Callable[..., Any], error: dict[str, object], title: str, remedy: str
) -> None:
    told = evaluate("(m, error) => m.explain(error)", {"message": "internal", **error})
    assert (told["title"], told["remedy"]) == (title, remedy)
    assert "internal" not in told["advice"]


def test_an_error_without_any_words_is_the_servers(evaluate: Callable[..., Any]) -> None:
    told = evaluate("(m) => m.explain({})")
    assert told["title"] == "Something went wrong on the server."


def test_a_refusal_of_the_request_itself_is_quoted(evaluate: Callable[..., Any]) -> None:
    error = {
        "code": "invalid_request_error",
        "status": 400,
        "message": "`input` is not understood.",
    }
    told = evaluate("(m, error) => m.explain(error)", error)
    assert told["advice"] == "`input` is not understood."


@pytest.mark.parametrize(
    ("wait", "shown"), [("7", "7 s"), ("0.4", "1 s"), ("soon", None), (None, None)]
)
def test_the_servers_wait_is_passed_on(
    evaluate: Callable[..., Any], wait: str | None, shown: str | None
) -> None:
    error = {"code": "overloaded", "headers": {"retry-after": wait} if wait else None}
    advice = evaluate("(m, error) => m.explain(error)", error)["advice"]
    assert advice.startswith("It is at capacity right now.")
    assert advice.endswith("now." if shown is None else f"about {shown}.")
