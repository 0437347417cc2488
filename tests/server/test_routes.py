"""Tests that a server follows the routes of the members file while requests run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from shutil import copytree
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from server.contract.generation import Finished
from server.main import wait_for_news
from server.model_changes import read_models
from server.text.process import at_once
from tests.server.scheduling.fakes import completion_ids, make_request, server_config
from tests.server.scheduling.test_fleet import read_all, read_some
from tests.server.test_model_changes import CHAT, CODE, SQL, Scene, scene
from triolet.config.members import Member, Members, written_members
from triolet.config.routes import Route
from triolet.ids import Role

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

    from triolet.config import ServedModelConfig

OLD = Route({"chat": 1}, "chat", 1)
BOTH = Route({"chat": 1, "next": 0}, "chat", 2)
NEW = Route({"next": 1}, "next", 3)
OTHER = Route({"nowhere": 1}, "nowhere", 1)
NEXT = replace(CODE, name="next", aliases=())
NAMED = [replace(NEXT, name=name, aliases=("gpt",)) for name in ("first", "second")]


def use(one: Scene, route: Route | None, *models: ServedModelConfig) -> None:
    """Write these models, one worker each, and this route of `chat` to the file."""
    members = tuple(Member(Role.DECODE, model.decode_addresses[0], model.name) for model in models)
    one.changes.use(Members(members, models, {} if route is None else {"chat": route}))


def serves_both(one: Scene) -> bool:
    """Return whether the server has both versions and the route to them."""
    versions = {model.version for model in one.services.models}
    return {"chat", "next"} <= versions and one.services.models.routes == {"chat": BOTH}


async def test_a_name_moves_to_another_version_and_streams_of_the_old_one_end_on_it() -> None:
    async with scene() as one:
        links = one.fleets.by_model["chat"]
        use(one, OLD, CHAT)
        stream = links.submit(make_request(1, max_tokens=40))
        await read_some(stream, 3)
        use(one, BOTH, CHAT, NEXT)
        await one.until(lambda: serves_both(one))
        assert one.services.models.named("chat").version == "chat"
        use(one, NEW, NEXT)
        assert one.services.models.named("chat").version == "next", "at once"
        assert one.services.models.named(None).name == "chat"
        assert isinstance((await read_all(stream))[1], Finished)
        await one.until(lambda: [*one.fleets.by_model] == ["next"])
        assert one.listed == ["chat"]
        assert one.names["chat"] == ("chat",), "it has prices and a place in ladders"


async def test_a_version_takes_the_place_of_the_one_before_among_the_models() -> None:
    async with scene() as one:
        one.changes.use(Members((), (CHAT, CODE), {"chat": OLD}))
        await one.until(lambda: "code" in one.listed)
        one.changes.use(Members((), (CHAT, NEXT, CODE), {"chat": BOTH}))
        await one.until(lambda: serves_both(one))
        one.changes.use(Members((), (NEXT, CODE), {"chat": NEW}))
        assert one.services.models.named(None).version == "next"


async def test_versions_of_one_route_have_the_same_aliases() -> None:
    async with scene() as one:
        for revision, versions in enumerate((NAMED[:1], NAMED, NAMED[1:])):
            shares = {version.name: 1.0 for version in versions}
            route = Route(shares, versions[0].name, revision)
            one.changes.use(Members((), (CHAT, *versions), {"talk": route}))
            await one.until(lambda route=route: one.services.models.routes == {"talk": route})
            assert one.listed == ["chat", "talk", "gpt"]
            assert one.services.models.named("gpt").version == route.stable


async def test_a_route_to_a_version_that_is_not_there_leaves_the_old_one() -> None:
    async with scene() as one:
        use(one, OLD, CHAT)
        with capture_logs() as lines:
            use(one, NEW, CHAT)
            use(one, NEW, CHAT)
        assert [line["reason"] for line in lines] == [
            "this server has no version next; the old route stays"
        ]
        use(one, NEW, NEXT)
        assert one.services.models.named("chat").version == "chat", "it is being read"
        await one.until(lambda: one.services.models.named("chat").version == "next")
        await one.until(lambda: [*one.fleets.by_model] == ["next"])


async def test_of_two_writers_of_one_revision_the_first_one_counts() -> None:
    async with scene() as one:
        first = Route({"chat": 0, "next": 1}, "next", 3)
        use(one, first, CHAT, NEXT)
        await one.until(lambda: one.services.models.routes == {"chat": first})
        with capture_logs() as lines:
            use(one, Route({"chat": 1, "next": 0}, "chat", 3), CHAT, NEXT)
            use(one, BOTH, CHAT, NEXT)
        assert {line["event"] for line in lines} == {"route_refused"}
        assert "revision 2 is not above the one that is used" in lines[1]["reason"]
        assert one.services.models.routes == {"chat": first}


async def test_a_name_of_another_model_is_no_public_name() -> None:
    async with scene() as one:
        use(one, None, CHAT, NEXT)
        await one.until(lambda: "next" in one.listed)
        with capture_logs() as lines:
            one.changes.use(Members((), (CHAT, NEXT), {"chat": Route({"next": 1}, "next", 1)}))
        assert "two models are called 'chat'" in lines[0]["reason"]
        assert one.services.models.named("chat").version == "chat"


async def test_a_version_that_computes_alike_keeps_the_links_of_the_other_one(
    tmp_path: Path,
) -> None:
    first = replace(CODE, digest="sha256:1", compute_digest="sha256:c")
    folder = copytree(CODE.model_dir, tmp_path / "cold")
    (folder / "generation_config.json").write_text('{"temperature": 0.125}')
    second = replace(first, digest="sha256:2", model_dir=str(folder))
    async with scene() as one:
        one.changes.use(Members((), (CHAT, first)))
        await one.until(lambda: "code" in one.listed)
        links = one.fleets.by_model["code"]
        one.changes.use(Members((), (CHAT, second)))
        await one.until(lambda: one.services.models.named("code").digest == second.digest)
        assert one.services.models.named("code").defaults.temperature == 0.125
        assert one.fleets.by_model["code"] is links
        assert links.version == second.digest
        assert one.listed == ["chat", "code", "coder"]
        broken = replace(second, digest="sha256:3", model_dir=str(tmp_path))
        one.changes.use(Members((), (CHAT, broken)))
        await one.until(lambda: "code" in one.changes.refused)
        one.changes.use(Members((), (CHAT, broken)))
        assert one.services.models.named("code").digest == second.digest
        one.changes.use(Members((), (CHAT, second)))
        assert one.changes.refused == {}


async def test_a_server_that_was_away_takes_a_version_and_an_adapter_at_once(
    tmp_path: Path,
) -> None:
    first = replace(CODE, digest="sha256:1", compute_digest="sha256:c")
    folder = copytree(CODE.model_dir, tmp_path / "cold")
    both = replace(first, digest="sha256:2", model_dir=str(folder), adapters=(SQL,))
    async with scene() as one:
        one.changes.use(Members((), (CHAT, first)))
        await one.until(lambda: "code" in one.listed)
        links = one.fleets.by_model["code"]
        one.changes.use(Members((), (CHAT, both)))
        assert "code" in one.listed
        await one.until(lambda: "code:sql" in one.listed)
        assert one.services.models.named("code").digest == both.digest
        assert one.fleets.by_model["code"] is links


async def test_nothing_is_kept_of_a_public_name_that_is_gone() -> None:
    async with scene() as one:
        forgotten: list[str] = []
        one.services.kept.forget_model = forgotten.append  # type: ignore[method-assign]
        use(one, OLD, CHAT)
        use(one, BOTH, CHAT, NEXT)
        await one.until(lambda: serves_both(one))
        use(one, NEW, NEXT)
        await one.until(lambda: "chat" not in one.fleets.by_model)
        one.changes.use(Members((), (NEXT, CODE), {"chat": NEW}))
        await one.until(lambda: "code" in one.listed)
        assert forgotten == [], "its other version has it"
        one.changes.use(Members((), (CODE,)))
        await one.until(lambda: "next" not in one.fleets.by_model)
        assert forgotten == ["chat", "next"]
        assert one.names == {"code": ("code", "coder")}


def test_a_server_that_starts_has_the_routes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_bytes(written_members(Members((), (CHAT, NEXT), {"chat": BOTH, "x": OTHER})))
    path.chmod(0o600)
    config = server_config(models=(CHAT,), members_file=str(path))
    assert read_models(config, at_once)[3] == {"chat": BOTH}


CANARY = Route({"chat": 0.5, "next": 0.5}, "chat", 40, valid_until=10.0)
PROMOTED = Route({"chat": 0, "next": 1}, "next", 3)


def routed(one: Scene) -> tuple[int, float | None]:
    route = one.services.models.routes["chat"]
    return route.revision, route.valid_until


async def with_both(one: Scene) -> list[float]:
    """Serve both versions by a route of the file; return the server's wall clock."""
    wall = [0.0]
    object.__setattr__(one.services, "wall", lambda: wall[0])
    use(one, BOTH, CHAT, NEXT)
    await one.until(lambda: serves_both(one))
    return wall


async def test_a_temporary_route_goes_first_and_is_withdrawn() -> None:
    async with scene() as one:
        await with_both(one)
        with capture_logs() as lines:
            one.changes.use_routes({"chat": CANARY})
            one.changes.use_routes({"chat": msgspec.structs.replace(CANARY, valid_until=9.0)})
            assert routed(one) == (40, 9.0)
            one.changes.use_routes({"chat": msgspec.structs.replace(CANARY, valid_until=9.5)})
            assert routed(one) == (40, 9.5), "a renewal, at the same revision"
            one.changes.use_routes({})
        assert one.services.models.routes == {"chat": BOTH}
        assert [line["event"] for line in lines] == ["routes_changed"] * 2, "renewals are no change"


async def test_after_a_promotion_the_lower_revision_of_the_file_counts() -> None:
    async with scene() as one:
        await with_both(one)
        one.changes.use_routes({"chat": CANARY})
        use(one, PROMOTED, CHAT, NEXT)
        assert routed(one) == (40, 10.0), "the rollout goes on until it is withdrawn"
        one.changes.use_routes({})
        assert one.services.models.routes == {"chat": PROMOTED}
        with capture_logs() as lines:
            use(one, BOTH, CHAT, NEXT)
        assert one.services.models.routes == {"chat": PROMOTED}
        assert "revision 2 is not above" in lines[0]["reason"], "writers of one source are ordered"


async def test_a_route_that_expires_leads_back_without_a_message(
    autojump_clock: MockClock,
) -> None:
    async with scene() as one:
        await one.changes._read(NEXT, one.changes._serve)
        object.__setattr__(one.services, "wall", trio.current_time)
        use(one, BOTH, CHAT, NEXT)
        now = trio.current_time()
        for seconds in (5.0, 8.0):
            ends_at = now + seconds
            one.changes.use_routes({"chat": msgspec.structs.replace(CANARY, valid_until=ends_at)})
        use(one, PROMOTED, CHAT, NEXT)
        await trio.sleep(7.9)
        assert routed(one) == (40, now + 8.0)
        await trio.sleep(0.2)
        assert one.services.models.routes == {"chat": PROMOTED}
        one.changes.use_routes({"chat": msgspec.structs.replace(CANARY, valid_until=now + 12.0)})
        assert routed(one) == (40, now + 12.0), "control is back"
        await trio.sleep(5.0)
        assert one.services.models.routes == {"chat": PROMOTED}


async def test_a_withdrawn_route_that_nothing_can_replace_leads_to_its_stable_version() -> None:
    async with scene() as one:
        await with_both(one)
        one.changes.use_routes({"chat": CANARY})
        use(one, Route({"nowhere": 1}, "nowhere", 9), CHAT, NEXT)
        one.changes.use_routes({})
        assert routed(one) == (40, 0.0)
        assert one.services.models.routes["chat"].is_over(one.services.wall())


async def test_a_permanent_route_of_control_stays_while_it_is_away() -> None:
    async with scene() as one:
        await with_both(one)
        one.changes.use_routes({"chat": PROMOTED})
        one.changes.use_routes({})
        assert one.services.models.routes == {"chat": PROMOTED}


async def test_a_retry_after_a_rollback_stays_on_the_workers_of_its_version(
    autojump_clock: MockClock,
) -> None:
    async with scene() as one:
        await one.changes._read(NEXT, one.changes._serve)
        object.__setattr__(one.services, "wall", trio.current_time)
        use(one, Route({"chat": 0, "next": 1}, "next", 2), CHAT, NEXT)
        until = trio.current_time() + 10.0
        canary = Route({"chat": 1, "next": 0}, "next", 1, valid_until=until)
        one.changes.use_routes({"chat": canary})
        stream = one.fleets.by_model["chat"].submit(make_request(1, max_tokens=40))
        begun = await read_some(stream, 3)
        one.changes.use_routes({})
        assert one.services.models.routes["chat"].stable == "next"
        assert not one.services.models.routes["chat"].shares["chat"]
        await one.restart_decode()
        tokens, end = await read_all(stream)
        assert isinstance(end, Finished)
        assert [*begun, *tokens] == completion_ids(0, 40)


async def test_a_server_that_starts_during_a_rollout_waits_for_the_route_of_control(
    autojump_clock: MockClock,
) -> None:
    async with scene(control_addresses=("mem://control",)) as one:
        wait = partial(wait_for_news, one.services, one.changes)
        began_at = trio.current_time()
        await wait()
        assert trio.current_time() == began_at, "there is one version"
        await one.changes._read(NEXT, one.changes._serve)
        use(one, BOTH, CHAT, NEXT)
        began_at = trio.current_time()
        await wait()
        waited_s = trio.current_time() - began_at
        assert waited_s == pytest.approx(one.services.config.routes.first_news_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            one.changes.use_routes({"chat": CANARY})
        assert trio.current_time() - began_at == waited_s, "it has heard control"
