"""Tests of the dashboard's line charts and error budgets in Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.chromium import Complaints

from .conftest import new_page
from .test_dashboard import status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

MARKUP = "<img src=x onerror=alert(1)>"
FIGURES = (
    *("prompt_tokens_per_s", "refusals_per_s", "queued", "kv_used_share"),
    *("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"),
)


def figures(*tokens: float | None) -> dict[str, list[float | None]]:
    return {"tokens_per_s": [*tokens], **{name: [None, 0.5, 0.25] for name in FIGURES}}


def history() -> dict[str, Any]:
    return {
        "at_s": [0, 10, 20],
        "all": figures(None, 40, 30),
        "models": {"chat": figures(None, 30, 10), MARKUP: figures(None, 10, 20)},
        "tenants": {"acme": {"tokens_per_s": [0, 0, 7]}, "other": {"tokens_per_s": [0, 1, 2]}},
        "objectives": {
            "availability": {"burn_rate": [None, 0, 20], "remaining_minutes": [5, 0, -5]}
        },
    }


def objective() -> dict[str, Any]:
    pair = {"severity": "page", "long": "1h", "short": "5m", "limit": 14.4, "fires": True}
    return {
        "name": "availability",
        "target": 0.99,
        "freezes": True,
        "budget": {"minutes": 432, "remaining_minutes": -5, "is_spent": True},
        "events": {"budget": {"good": 800, "total": 1000}},
        "burn_rates": {"1h": 20, "5m": 30},
        "pairs": [pair, pair | {"severity": "ticket", "limit": 50, "fires": False}],
    }


@pytest.fixture
def board(browser: Browser, server: FakeServer) -> Iterator[Page]:
    """The dashboard, with a clock that the test advances. Fails if Chromium reports an error."""
    server.status = status(100.0, [0, 0, 0, 0])
    server.history = history()
    server.slo = {"is_frozen": True, "reason": "it is spent", "objectives": [objective()]}
    page = new_page(browser)
    complaints = Complaints()
    with complaints.of(page):
        page.clock.install()
        page.goto(f"{server.url}dashboard")
        expect(page.locator("#budgets li")).to_have_count(1)
        yield page
        page.goto("about:blank")
    page.context.close()
    assert not complaints.unexpected


def chart(board: Page, title: str) -> Locator:
    return board.locator(".chart").filter(has_text=title)


def test_a_chart_has_lines_axes_and_the_values_at_the_cursor(board: Page) -> None:
    tokens = chart(board, "Tokens per second").first
    expect(tokens.locator("path.line")).to_have_count(2)
    d = tokens.locator("path.line").first.get_attribute("d") or ""
    assert (d[0], d.count("L")) == ("M", 1), "a gap, then two points"
    expect(tokens.locator(".chart-legend li")).to_have_text(["sent 30", "prompt 0.25"])
    picture = tokens.get_by_role("img")
    expect(picture).to_have_attribute("aria-label", "Tokens per second; now sent 30, prompt 0.25")
    picture.focus()
    for _ in range(2):
        picture.press("ArrowLeft")
    expect(tokens.locator(".chart-legend li").first).to_have_text("sent 40")
    expect(tokens.locator(".cursor")).to_have_attribute("visibility", "visible")
    picture.blur()
    expect(tokens.locator(".chart-words")).to_contain_text("latest")
    box = picture.bounding_box()
    assert box is not None
    board.mouse.move(box["x"] + box["width"] * 0.15, box["y"] + 20)
    expect(tokens.locator(".chart-legend li").first).to_have_text("sent –")


def test_a_model_and_a_tenant_are_chosen_and_stay_chosen(board: Page, server: FakeServer) -> None:
    sent = chart(board, "Tokens per second").first.locator(".chart-legend li").first
    board.locator("#chart-model").select_option(MARKUP)
    expect(sent).to_have_text("sent 20")
    tenants = chart(board, "by tenant").locator(".chart-legend li")
    expect(tenants).to_have_text(["acme 7", "other 2"])
    board.locator("#chart-tenant").select_option("other")
    expect(tenants).to_have_text(["other 2"])
    server.history["models"][MARKUP] = figures(None, 10, 99)
    board.clock.run_for(10_100)
    expect(sent).to_have_text("sent 99")
    expect(tenants).to_have_text(["other 2"])
    expect(board.locator("main img")).to_have_count(0)


def test_a_spent_budget_says_so(board: Page) -> None:
    expect(board.locator("#frozen")).to_have_text("Rollouts are frozen: it is spent.")
    row = board.locator("#budgets li")
    for words in (
        "availability",
        "99 %",
        "80 % of 1,000",
        "-5 min of 432 min",
        "frozen: budget spent",
    ):
        expect(row).to_contain_text(words)
    expect(row.locator(".fires")).to_have_text(["1h 20, 5m 30 (page above 14.4): fires"])
    left = chart(board, "Error budget left")
    expect(left.locator(".chart-legend li")).to_have_text(["availability -5 min"])


def test_an_axis_ends_at_a_round_number(board: Page) -> None:
    ends = board.evaluate(
        """async (values) => {
          const { scaleOf } = await import("/static/charts.js");
          return values.map((one) => [scaleOf(one).end, scaleOf(one).step]);
        }""",
        [0, 1, 7, 40, 0.02],
    )
    assert ends == [[1, 1], [1, 0.25], [8, 2], [40, 10], [0.02, 0.005]]
