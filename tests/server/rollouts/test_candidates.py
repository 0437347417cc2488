"""Tests that a server follows the rollouts of control, and that users, accounts, metrics and caches
see nothing of what it does for candidates."""

from __future__ import annotations

import sqlite3
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, get_args

import msgspec
import trio

from server.contract.generation import CacheAsk
from server.contract.request_events import RequestEvent
from server.main import _find_version
from server.rollouts.candidates import Candidates, ServedVersion
from server.rollouts.collector import RolloutCollector
from server.rollouts.golden import PROMPTS
from server.scheduling.control_link import ControlLink
from server.tenants.usage_ledger import opened_ledger
from tests.server.scheduling import fakes
from tests.server.scheduling.fake_processes import FakeProcess
from tests.server.scheduling.fakes import FakeDecode, make_request, server_config
from tests.server.scheduling.test_fleet import Cluster, read_all, running
from tests.server.scheduling.test_presence import CONTROL, FakeControl
from tests.server.scheduling.test_presence import Scene as ControlScene
from tests.server.test_model_changes import CHAT, Scene, scene
from tests.server.test_routes import BOTH, NEXT, use
from tests.server.tiny_text import tiny_text
from transport.control_protocol import Activity, Models, encoded
from transport.frames import ControlNews, Reserve
from transport.rollout_protocol import RolloutPhase, RolloutView
from triolet.config import CandidateConfig, ResponseCacheConfig, UsageConfig
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest
    from trio.testing import MockClock

    from transport.rollout_protocol import CandidateReport

VIEW = RolloutView(
    "rollout-1",
    "chat",
    "chat",
    "next",
    "",
    RolloutPhase.SHADOW,
    0,
    (0.1, 1.0),
    0.0,
    "",
    golden_every_s=5.0,
    shadow_share=1.0,
)
ENCODE = tiny_text().encode
CONFIG = CandidateConfig(golden_deadline_s=2.0)
NEWS_S = 0.5
"""How often the fake control sends news."""


@dataclass
class Following:
    """Two versions, and the candidates that follow a view."""

    stable: Cluster
    own: Cluster
    candidates: Candidates
    views: tuple[RolloutView, ...] = (VIEW,)
    is_silent: bool = False

    async def send_news(self) -> None:
        while True:
            if not self.is_silent:
                self.candidates.use(self.views)
            await trio.sleep(NEWS_S)

    @property
    def report(self) -> CandidateReport:
        [(version, report)] = self.candidates.reports().items()
        assert version == "next"
        return report

    @property
    def num_asked(self) -> int:
        return sum(isinstance(one, Reserve) for one in self.own.decode.received)


@asynccontextmanager
async def following(*views: RolloutView) -> AsyncIterator[Following]:
    async with running() as stable, running() as own:
        found = {"chat": stable, "next": own}

        def find(name: str) -> ServedVersion | None:
            return ServedVersion(found[name].fleet, ENCODE) if name in found else None

        async with trio.open_nursery() as nursery:
            one = Following(stable, own, Candidates(CONFIG, find), views or (VIEW,))
            nursery.start_soon(one.candidates.run)
            nursery.start_soon(one.send_news)
            yield one
            nursery.cancel_scope.cancel()


async def test_golden_prompts_are_asked_at_once_and_again_at_their_interval(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following() as one:
        await trio.sleep(3.0)
        first = one.report
        assert (len(first.golden), first.golden_error, one.num_asked) == (4, "", 4)
        monkeypatch.setattr(fakes, "STORY", fakes.STORY.replace("ü", "u"))
        await trio.sleep(6.0)
        assert one.num_asked == 8
        assert one.report.golden != first.golden


async def test_golden_prompts_begin_once_the_news_have_their_interval(
    autojump_clock: MockClock,
) -> None:
    async with following(replace_view(golden_every_s=0.0)) as one:
        await trio.sleep(3.0)
        assert (one.report.golden, one.num_asked) == ((), 0)
        one.views = (VIEW,)
        await trio.sleep(3.0)
        assert (len(one.report.golden), one.num_asked) == (4, 4)


async def test_an_error_is_reported_only_before_the_first_answers(
    autojump_clock: MockClock,
) -> None:
    async with following() as one:
        one.own.decode_process.is_held = True
        await trio.sleep(6.0)
        assert "a golden prompt failed: " in one.report.golden_error
        assert "within its 2 s" in one.report.golden_error
        one.own.decode_process.is_held = False
        await trio.sleep(8.0)
        first = one.report
        assert (len(first.golden), first.golden_error) == (4, "")
        one.own.decode_process.is_held = True
        await trio.sleep(6.0)
        assert one.report == first, "it may merely be busy"
        one.own.decode_process.is_held = False


async def test_a_candidate_that_leaves_reports_no_error(autojump_clock: MockClock) -> None:
    async with following() as one, trio.open_nursery() as nursery:
        one.own.decode_process.is_held = True
        await trio.sleep(1.0)
        nursery.start_soon(one.own.fleet.drain)
        await trio.sleep(6.0)
        assert (one.report.golden, one.report.golden_error) == ((), "")
        one.own.decode_process.is_held = False


async def test_copies_follow_the_share_of_the_news(autojump_clock: MockClock) -> None:
    async with following(replace_view(golden_every_s=0.0)) as one:
        await trio.sleep(1.0)
        await read_all(one.stable.fleet.submit(make_request(1)))
        await trio.sleep(1.0)
        assert one.report.shadow.pairs == 1
        one.views = (replace_view(golden_every_s=0.0, shadow_share=0.0),)
        await trio.sleep(1.0)
        await read_all(one.stable.fleet.submit(make_request(2)))
        await trio.sleep(1.0)
        assert (one.report.shadow.pairs, one.num_asked) == (1, 1)


async def test_nothing_is_done_once_a_rollout_has_ended_or_is_gone(
    autojump_clock: MockClock,
) -> None:
    async with following() as one:
        for phase in (RolloutPhase.PROMOTED, RolloutPhase.ROLLED_BACK, None):
            one.views = (VIEW,)
            await trio.sleep(3.0)
            asked = one.num_asked
            one.views = () if phase is None else (replace_view(phase=phase),)
            await trio.sleep(1.0)
            assert one.stable.fleet.witness is None
            await read_all(one.stable.fleet.submit(make_request(1)))
            await trio.sleep(10.0)
            assert one.num_asked == asked
            assert one.candidates.reports() == {}


async def test_without_news_all_stops_until_control_returns(autojump_clock: MockClock) -> None:
    async with following() as one:
        await trio.sleep(3.0)
        one.is_silent = True
        await trio.sleep(CONFIG.news_s + 1.0)
        asked = one.num_asked
        assert one.candidates.reports() == {}
        await read_all(one.stable.fleet.submit(make_request(1)))
        await trio.sleep(10.0)
        assert one.num_asked == asked
        one.is_silent = False
        await trio.sleep(3.0)
        assert one.num_asked == asked + len(PROMPTS)
        await read_all(one.stable.fleet.submit(make_request(2)))
        await trio.sleep(1.0)
        assert one.report.shadow.pairs == 1


async def test_a_rollout_of_versions_that_this_server_lacks_is_left_alone(
    autojump_clock: MockClock,
) -> None:
    async with following(
        replace_view(id="1", candidate="other"), replace_view(id="2", candidate="chat")
    ) as one:
        await trio.sleep(3.0)
        assert one.candidates.reports() == {}
        assert one.num_asked == 0


def replace_view(**changes: object) -> RolloutView:
    return msgspec.structs.replace(VIEW, **changes)


async def test_news_of_control_lead_to_answers_in_the_next_reports(
    autojump_clock: MockClock,
) -> None:
    async with running() as own, trio.open_nursery() as nursery:
        server = ControlScene(nursery, (CONTROL,))
        await server.start_workers()
        await nursery.start(server.fleet.run)
        found = {
            "tiny": ServedVersion(server.fleet, ENCODE),
            "next": ServedVersion(own.fleet, ENCODE),
        }
        candidates = Candidates(CONFIG, found.get)
        nursery.start_soon(candidates.run)
        config = server_config(control_addresses=(CONTROL,))
        reports = RolloutCollector()
        reports.tested = candidates
        link = ControlLink(
            config, server.network, "server", {"tiny": server.fleet}, rollouts=reports
        )
        nursery.start_soon(link.run)
        async with server.control() as control:
            control.send(ControlNews(encoded(Models((), rollouts=(replace_view(stable="tiny"),)))))
            with trio.fail_after(60.0):
                report = await report_with_answers(control)
        assert len(report.golden) == len(PROMPTS)
        nursery.cancel_scope.cancel()


async def report_with_answers(control: FakeControl) -> CandidateReport:
    while True:
        said = await control.hear()
        if (
            isinstance(said, Activity)
            and "next" in said.candidates
            and said.candidates["next"].golden
        ):
            return said.candidates["next"]


OF_WORKERS = (
    *("triolet_worker", "triolet_kv", "triolet_step_tokens", "vllm:iteration_tokens"),
    *("triolet_requests_running", "vllm:num_requests_running", "triolet_line_tokens_per_second"),
    *("process_", "python_"),
)
"""Names of metrics about machines and processes, which a copy uses like any request."""


def figures_of_requests(one: Scene) -> dict[str, float]:
    """Return all metrics except those of machines."""
    lines = one.metrics.exposition().decode().splitlines()
    named = [line for line in lines if not line.startswith(("#", *OF_WORKERS))]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in named)}


async def test_users_accounts_metrics_and_caches_see_nothing(tmp_path: Path) -> None:
    cache = ResponseCacheConfig(max_bytes=MIB)
    config = UsageConfig(directory=str(tmp_path), interval_s=1e6)
    seen: list[RequestEvent] = []
    async with scene(response_cache=cache) as one, trio.open_nursery() as nursery:
        use(one, BOTH, CHAT, NEXT)
        await one.until(lambda: "next" in one.fleets.by_model)
        own, stable = one.fleets.by_model["next"], one.fleets.by_model["chat"]
        await nursery.start(FakeProcess(one.network, FakeDecode("code")).run)
        await own.wait_ready()
        for kind in get_args(RequestEvent):
            own.events.subscribe(kind, seen.append)
        candidates = Candidates(CONFIG, partial(_find_version, one.services, one.fleets))
        nursery.start_soon(candidates.run)
        front = one.services.models.named("chat").fleet
        asked = replace(make_request(), cache=CacheAsk(may_find=True, is_reproducible=True))
        with opened_ledger(config) as ledger:
            assert ledger is not None
            for links in (own, stable):
                ledger.subscribe_to(links.events)
            candidates.use((replace_view(golden_every_s=0.0),))
            await one.until(lambda: stable.witness is not None)
            await read_all(front.submit(asked))
            store, before = one.services.store, figures_of_requests(one)
            assert store is not None
            kept = len(store), dict(store.outcomes)
            await one.until(lambda: candidates.reports()["next"].shadow.pairs == 1)
            candidates.use(())
            await one.until(lambda: stable.witness is None)
            candidates.use((VIEW,))
            await one.until(lambda: stable.witness is not None)
            await one.until(lambda: bool(candidates.reports()["next"].golden))
            after = figures_of_requests(one)
            changed = sorted(
                {name.partition("{")[0] for name in after if after[name] != before.get(name)}
            )
            assert changed == [], str(changed)
            assert (len(store), dict(store.outcomes)) == kept
            assert seen == []
            assert own.status().accepted == 1 + len(PROMPTS), "only the scheduler counts them"
        own.submit(make_request(3))
        assert len(seen) > 0, "a request of a user is seen"
        assert figures_of_requests(one) != after
        nursery.cancel_scope.cancel()
    with closing(sqlite3.connect(tmp_path / "usage.sqlite3")) as database:
        rows = database.execute("SELECT request_id FROM requests").fetchall()
    assert rows == [(asked.request_id.hex(),)]
