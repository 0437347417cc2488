"""Tests of the dashboard's rollouts in Chromium."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace
from playwright.sync_api import expect

from tests.chromium import Complaints
from tests.server.support.rollouts import BEGAN_AT, ENDED, VIEW
from tools.screenshot import ROLLOUT
from transport.rollout_protocol import RolloutNote, RolloutPhase, RolloutView

from .conftest import new_page
from .test_accessibility import check
from .test_charts import objective
from .test_dashboard import status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

    from .fake_server import FakeServer

pytestmark = pytest.mark.slow

MARKUP = "<img src=x onerror=alert(1)>"


def shown(view: RolloutView, valid_s: float | None = 8.0) -> dict[str, Any]:
    """Return a rollout as GET /fleet/rollouts does."""
    row: dict[str, Any] = msgspec.to_builtins(view)
    return row | {"share": view.share, "route_valid_s": valid_s}


@pytest.fixture
def board(browser: Browser, server: FakeServer) -> Iterator[Page]:
    """The dashboard, beside a rollout, with a clock that the test advances. Chromium must report no
    error."""
    server.status = status(100.0, [0, 0, 0, 0])
    server.slo = {"is_frozen": True, "reason": "it is spent", "objectives": [objective()]}
    server.history["models"] = {
        "chat-1": {"ttft_p50_s": [None, 0.05], "ttft_p99_s": [0.1, 0.2]},
        "chat-2": {"ttft_p50_s": [0.07, 0.06], "ttft_p99_s": [0.1, None]},
    }
    server.rollouts = [shown(VIEW)]
    page = new_page(browser)
    complaints = Complaints()
    with complaints.of(page):
        page.clock.install()
        page.goto(f"{server.url}dashboard")
        expect(page.locator("#rollouts > li")).to_have_count(1)
        expect(page.locator("#budgets li")).to_have_count(1)
        yield page
        page.goto("about:blank")
    page.context.close()
    assert not complaints.unexpected


def figure(board: Page, name: str) -> Locator:
    return board.locator(f"#rollouts [data-figure={name}]").first


def next_look(board: Page) -> None:
    board.clock.run_for(2_100)


def test_both_versions_stand_side_by_side(board: Page) -> None:
    expect(figure(board, "versions")).to_have_text("chat-1 → chat-2 0123456789ab")
    expect(figure(board, "phase")).to_have_text("canary")
    expect(figure(board, "said")).to_have_text(VIEW.said)
    cells = [
        row.locator("th, td").all_text_contents()
        for row in figure(board, "arms").locator("tr").all()
    ]
    assert cells == [
        ["share of new requests", "90 %", "10 %"],
        ["requests", "1,000", "120"],
        [
            "errors",
            "1 % (10 of 1,000); last minute 4 of 404",
            "2.5 % (3 of 120); last minute 2 of 40",
        ],
        [
            "slow first token",
            "0.99 % (5 of 505); last minute 2 of 202",
            "0 % (0 of 60); last minute 0 of 20",
        ],
        ["time to first token, p50", "50 ms", "60 ms"],
        ["time to first token, p99", "200 ms", "–"],
    ]
    steps = figure(board, "steps").locator("li")
    expect(steps).to_have_text(["1 %", "10 %", "100 %"])
    expect(steps.nth(0)).to_have_class("past")
    expect(steps.nth(1)).to_have_attribute("aria-current", "step")


def test_costs_budgets_shadow_copies_and_who_did_what(board: Page) -> None:
    for words in (
        "0.95 to 1.21 times as much",
        "-5 min of 432 min",
        "it is spent",
        "40; 2 failed, 3 skipped",
        "95 %",
        "90 %",
        "100 ms → 110 ms",
        "20 ms → 21 ms",
    ):
        expect(figure(board, "facts")).to_contain_text(words)
    board.get_by_text("History").click()
    notes = figure(board, "history").locator("li")
    expect(notes).to_have_count(2)
    expect(notes.nth(0)).to_contain_text("canary, step 2: step 1 has passed (the judge)")
    expect(notes.nth(1)).to_contain_text("preparing, step 0: started (alice)")
    expect(notes.nth(0).locator("time")).to_have_attribute("datetime", "2023-11-14T22:13:20.000Z")


def test_a_rollback_is_seen_at_the_next_look_and_the_open_history_stays_open(
    board: Page, server: FakeServer
) -> None:
    board.get_by_text("History").click()
    over = RolloutNote(BEGAN_AT + 5, RolloutPhase.ROLLED_BACK, 2, MARKUP)
    view = replace(VIEW, phase=RolloutPhase.ROLLED_BACK, said=MARKUP, history=(*VIEW.history, over))
    server.rollouts = [shown(view, None)]
    next_look(board)
    expect(figure(board, "phase")).to_have_text("rolled back")
    expect(figure(board, "said")).to_have_text(MARKUP)
    expect(figure(board, "history").locator("li").first).to_contain_text(MARKUP)
    expect(board.locator("main img")).to_have_count(0)
    expect(board.locator("#rollouts [aria-current]")).to_have_count(0)
    expect(board.get_by_text("No rollout is running.")).to_be_visible()
    expect(figure(board, "trouble")).to_be_hidden()


def test_a_route_that_is_not_valid_is_said_to_be(board: Page, server: FakeServer) -> None:
    expect(figure(board, "trouble")).to_be_hidden()
    server.rollouts = [shown(VIEW, 0.0)]
    next_look(board)
    expect(figure(board, "trouble")).to_contain_text("all its new requests go to chat-1")


def test_a_rollout_that_goes_zone_by_zone_names_them(board: Page, server: FakeServer) -> None:
    expect(figure(board, "facts")).not_to_contain_text("zones")
    server.rollouts = [shown(replace(VIEW, zones=("east", "west")), None)]
    next_look(board)
    expect(figure(board, "facts")).to_contain_text("east, west")
    expect(figure(board, "trouble")).to_be_hidden()


def test_without_a_rollout_the_page_says_how_to_start_one(board: Page, server: FakeServer) -> None:
    expect(board.get_by_text("No rollout is running.")).to_be_hidden()
    server.rollouts = []
    next_look(board)
    expect(board.locator("#rollouts > li")).to_have_count(0)
    expect(board.get_by_text("No rollout is running.")).to_contain_text("triolet rollout start")


def test_a_running_rollout_comes_before_one_that_has_ended(board: Page, server: FakeServer) -> None:
    server.rollouts = [shown(ENDED, None), shown(VIEW)]
    next_look(board)
    phases = board.locator("#rollouts > li [data-figure=phase]")
    expect(phases).to_have_text(["canary", "rolled back"])
    expect(board.locator("#rollouts [data-figure=facts]").nth(1)).to_contain_text("not known yet")


def test_everything_stands_out_and_fits_a_small_phone(board: Page) -> None:
    board.get_by_text("History").click()
    for scheme in ("light", "dark"):
        board.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        check(board)
    board.set_viewport_size({"width": 360, "height": 640})
    assert board.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_picture_of_the_documents_shows_a_rollout_as_servers_do() -> None:
    view = msgspec.convert(ROLLOUT, RolloutView)
    assert shown(view).keys() - ROLLOUT.keys() == {"golden_every_s"}
    assert ROLLOUT["share"] == view.share
