"""Tests of the dashboard page: the figures that it shows, and its state if the server is silent."""

from __future__ import annotations

import copy
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.chromium import Complaints

from .conftest import VIEWPORT, new_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

BOUNDS_S = [0.01, 0.1, 1.0]
MARKUP = "<img src=x onerror=alert(1)>"


def worker(name: str, role: str, state: str = "alive", breaker: str = "closed") -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "state": state,
        "breaker": breaker,
        "blocks": {"used": 30, "cached": 50, "free": 20, "all": 100},
        "sequences": {"running": 3, "paused": 1, "waiting": 2},
        "step_s": 0.0123,
        "computed_tokens": 5,
        "model": "triolet-demo",
    }


def model(name: str, state: str = "serving", digest: str | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "aliases": [],
        "digest": digest,
        "state": state,
        "queued": 1,
        "running": 2,
        "workers": ["p0", "d0"],
        "weights_bytes": 9_761_168,
        "kv_bytes": 64 << 20,
        "max_model_len": 4096,
        "prompt_tokens": 12_345,
        "completion_tokens": 678,
        "worker_seconds": 5_400.0,
    }


def status(at_s: float, totals: list[int], recent: list[int] | None = None) -> dict[str, Any]:
    histogram = {"bounds_s": BOUNDS_S, "totals": totals}
    grown = [0, 0, 0, 0] if recent is None else recent
    return {
        "recent": {
            "seconds": 30.0,
            "counters": {
                "prompt_tokens": 10 * grown[-1],
                "cached_prompt_tokens": 4 * grown[-1],
            },
            "latencies": {
                name: {"bounds_s": BOUNDS_S, "totals": grown} for name in ("ttft", "itl", "queue")
            },
        },
        "model": "triolet-demo",
        "version": "1.2.3",
        "at_s": at_s,
        "is_draining": False,
        "servers": 1,
        "queued": 4,
        "running": 17,
        "connections": 21,
        "counters": {
            "requests_accepted": 1234,
            "requests_rejected": 5,
            "attempts_failed": 2,
            "prompt_tokens": 10 * totals[-1],
            "cached_prompt_tokens": 4 * totals[-1],
        },
        "queued_by_class": {"critical": 0, "default": 3, "sheddable": 1, "batch": 0},
        "rejected_by_code": {},
        "errors_by_status": {},
        "latencies": {name: copy.deepcopy(histogram) for name in ("ttft", "itl", "queue")},
        "models": [model("triolet-demo")],
        "workers": [worker("p0", "prefill"), worker("d0", "decode"), worker(MARKUP, "decode")],
    }


@pytest.fixture
def board(browser: Browser, server: FakeServer) -> Iterator[Page]:
    """The dashboard with a clock that the test advances. Chromium must report no error."""
    server.status = status(100.0, [0, 0, 0, 0])
    page = new_page(browser)
    complaints = Complaints()
    complaints.allow("Failed to load resource", "net::ERR_CONNECTION")
    with complaints.of(page):
        page.clock.install()
        page.goto(f"{server.url}dashboard")
        expect(page.locator("#fresh")).to_have_text("Live")
        yield page
        page.goto("about:blank")
    page.context.close()
    assert not complaints.unexpected


def value(board: Page, figure: str) -> Locator:
    return board.locator(f".tile[data-figure={figure}] .value")


def next_look(board: Page) -> None:
    board.clock.run_for(2_100)


def test_one_look_shows_rates_and_quantiles_of_the_last_seconds(
    board: Page, server: FakeServer
) -> None:
    expect(value(board, "queued")).to_have_text("4")
    expect(value(board, "running")).to_have_text("17")
    expect(value(board, "ttft50")).to_have_text("–")
    expect(value(board, "tokens")).to_have_text("0")
    server.status = status(200.0, [0, 90, 100, 1100], recent=[0, 90, 100, 100])
    board.reload()
    expect(value(board, "tokens")).to_have_text("6.7")
    expect(value(board, "cached")).to_have_text("40 %")
    expect(value(board, "ttft50")).to_have_text("60 ms")
    expect(value(board, "itl99")).to_have_text("910 ms")
    expect(board.locator(".tile[data-figure=tokens] path")).to_have_attribute(
        "d", re.compile("^M120")
    )
    expect(board.locator("#requests_accepted")).to_have_text("1,234")


def test_who_waits_and_why_others_were_refused(board: Page, server: FakeServer) -> None:
    classes = board.locator("#queued_by_class div")
    expect(classes).to_have_count(4)
    expect(classes.nth(1)).to_have_text("default3")
    expect(board.get_by_text("None by admission.")).to_be_visible()
    expect(board.get_by_text("No error answers.")).to_be_visible()
    server.status["errors_by_status"] = {"401": 7}
    server.status["rejected_by_code"] = {"rate_limit_exceeded": 1234, MARKUP: 1}
    next_look(board)
    refusals = board.locator("#rejected_by_code div")
    expect(refusals.nth(0)).to_have_text("rate limit exceeded1,234")
    expect(refusals.nth(1)).to_contain_text("<img src=x")
    expect(board.locator("main img")).to_have_count(0)
    expect(board.get_by_text("None by admission.")).to_be_hidden()
    expect(board.locator("#errors_by_status div")).to_have_text("4017")
    server.status["rejected_by_code"] = {"overloaded": 2}
    next_look(board)
    expect(refusals).to_have_count(1)


def test_every_worker_shows_its_state_and_its_blocks(board: Page, server: FakeServer) -> None:
    rows = board.locator(".worker")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("d0")
    expect(rows.nth(1).locator("[data-figure=used-bar]")).to_have_attribute("width", "30")
    expect(rows.nth(1).locator("[data-figure=free-bar]")).to_have_attribute("x", "80")
    expect(rows.nth(1).locator("[data-figure=step]")).to_have_text("12 ms")
    expect(rows.nth(2)).to_contain_text(MARKUP)
    expect(board.locator("main img")).to_have_count(0)
    server.status["workers"] = [
        worker("p0", "prefill", "dead"),
        worker("d0", "decode", breaker="open"),
    ]
    next_look(board)
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("dead")
    expect(rows.nth(1)).to_contain_text("alive, left out")


def test_models_show_their_version_state_and_memory(board: Page, server: FakeServer) -> None:
    shown = board.locator(".served")
    expect(shown).to_have_count(1)
    expect(board.locator("#model")).to_have_text("triolet-demo")
    expect(board.locator(".worker [data-figure=model]").first).to_be_empty()
    told = status(102.0, [0, 0, 0, 0])
    told["models"].append(model(MARKUP, "staged", "sha256:" + "0123456789abcdef" * 4))
    told["workers"][2]["model"] = MARKUP
    server.status = told
    next_look(board)
    expect(shown).to_have_count(2)
    expect(board.locator("#model")).to_have_text("2 models")
    expect(shown.nth(1).locator("[data-figure=name]")).to_have_text(MARKUP)
    for figure, text in {
        "version": "0123456789ab",
        "state": "staged",
        "workers": "2",
        "running": "2",
        "queued": "1",
        "weights": "9.3 MiB",
        "kv": "64 MiB",
        "prompt_tokens": "12,345",
        "completion_tokens": "678",
        "worker_seconds": "1.5 h",
    }.items():
        expect(shown.nth(1).locator(f"[data-figure={figure}]")).to_have_text(text)
    owners = board.locator(".worker [data-figure=model]")
    expect(owners).to_have_text(["triolet-demo", "triolet-demo", MARKUP])
    del told["models"][0]
    server.status = told | {"at_s": 104.0}
    next_look(board)
    expect(shown).to_have_count(1)


def test_a_server_that_is_gone_is_said_to_be_and_found_again(
    board: Page, server: FakeServer
) -> None:
    server.stop()
    next_look(board)
    expect(board.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(value(board, "running")).to_have_text("17")
    # Another process: its counters restart at zero, so the time in between is not shown.
    server.status = status(5.0, [0, 0, 0, 0]) | {"running": 1}
    server.start()
    next_look(board)
    expect(board.locator("#fresh")).to_have_text("Live")
    expect(value(board, "running")).to_have_text("1")
    expect(value(board, "tokens")).to_have_text("0")
    expect(board.get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (HTTPStatus.FORBIDDEN, "ssh -L"),
        (HTTPStatus.INTERNAL_SERVER_ERROR, "an error (500)"),
    ],
)
def test_a_refusal_says_what_to_do(
    board: Page, server: FakeServer, refusal: HTTPStatus, words: str
) -> None:
    server.status_refused = refusal
    next_look(board)
    expect(board.get_by_role("alert")).to_contain_text(words)
    server.status_refused = None
    next_look(board)
    expect(board.get_by_role("alert")).to_be_hidden()


def test_nothing_is_said_of_refusals_before_the_server_has(
    browser: Browser, server: FakeServer
) -> None:
    server.status_refused = HTTPStatus.UNAUTHORIZED
    page = new_page(browser)
    page.goto(f"{server.url}dashboard")
    expect(page.get_by_role("alert")).to_contain_text("needs an API key")
    expect(page.get_by_text("None by admission.")).to_be_hidden()
    expect(page.get_by_text("No error answers.")).to_be_hidden()
    page.context.close()


def test_a_key_can_be_entered_where_it_is_needed(board: Page, server: FakeServer) -> None:
    server.status_refused = HTTPStatus.UNAUTHORIZED
    next_look(board)
    expect(board.get_by_role("alert")).to_contain_text("needs an API key")
    field = board.get_by_label("API key of an operator")
    expect(field).to_be_focused()
    field.fill("sk-wrong")
    field.press("Enter")
    expect(board.get_by_role("alert")).to_contain_text("refuses the API key below")
    server.status_refused = None
    field.fill("sk-right")
    with board.expect_request("**/fleet/status") as asked:
        board.get_by_role("button", name="Show the fleet").click()
    assert asked.value.headers["authorization"] == "Bearer sk-right"
    expect(field).to_be_hidden()
    expect(board.get_by_role("alert")).to_be_hidden()


def test_nobody_looks_at_a_hidden_page_and_it_does_not_ask(board: Page) -> None:
    asked: list[str] = []
    board.on("request", lambda request: asked.append(request.url))
    hide = """(isHidden) => {
      Object.defineProperty(document, "hidden", {get: () => isHidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    board.evaluate(hide, True)
    board.clock.run_for(20_000)
    assert asked == []
    with board.expect_request("**/fleet/status"):
        board.evaluate(hide, False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_phone(board: Page, scheme: str) -> None:
    board.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    board.set_viewport_size({"width": 360, "height": 640})
    assert board.evaluate("document.documentElement.scrollWidth <= innerWidth")
    board.set_viewport_size(VIEWPORT)
