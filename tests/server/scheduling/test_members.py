"""Tests that workers join and leave while a server runs: streams are unaffected, and nothing is
left behind."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from server.contract.generation import Finished
from server.membership.members import MemberFile, by_model
from server.scheduling.workers import Worker
from tests.server.support.surface import until
from triolet.config import AdapterConfig, ServedModelConfig, ToolParser
from triolet.config.members import MAX_MEMBERS, Member, Members, read_members, written_members
from triolet.errors import ConfigError, RequestError
from triolet.ids import Role

from .fake_processes import FakeProcess
from .fakes import FakeDecode, completion_ids, make_request
from .test_fleet import Cluster, names, read_all, running, unbroken

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

PREFILL = (Role.PREFILL, "mem://prefill-0")
FIRST = (Role.DECODE, "mem://decode-0")
SECOND = (Role.DECODE, "mem://decode-1")
POLL_S = 0.005


async def second(cluster: Cluster) -> FakeDecode:
    """Start another decode worker that no server knows yet."""
    worker = FakeDecode("decode-1", epoch=77)
    cluster.decodes.append(worker)
    await cluster.nursery.start(FakeProcess(cluster.network, worker).run)
    return worker


async def test_a_worker_joins_and_another_leaves_when_its_streams_have_ended(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        # A request on the leaving worker ends there: nothing is computed twice.
        async with unbroken(cluster, 60, 5):
            joined = await second(cluster)
            cluster.fleet.set_members([PREFILL, FIRST, SECOND])
            await trio.sleep(2.0)
            assert names(cluster) == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "alive")
            cluster.fleet.set_members([PREFILL, SECOND])
            assert names(cluster)["decode-0"] == "draining"
            new = cluster.fleet.submit(make_request(2, max_tokens=30, seed=2))
            token_ids, end = await read_all(new)
            assert (token_ids, type(end)) == (completion_ids(2, 30), Finished)
            assert joined.steps > 0
        await trio.sleep(2.0)
        assert names(cluster) == {"prefill-0": "alive", "decode-1": "alive"}
        assert cluster.fleet.status().is_ready
        assert cluster.decode.rows == {}


async def test_a_worker_that_dies_as_it_leaves_is_left_and_its_stream_goes_on(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        async with unbroken(cluster, 60, 5):
            await second(cluster)
            cluster.fleet.set_members([PREFILL, SECOND])
            cluster.decode_process.kill()
        await trio.sleep(2.0)
        assert set(names(cluster)) == {"prefill-0", "decode-1"}


async def test_who_comes_back_before_it_has_left_was_never_away(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        async with unbroken(cluster, 60, 5):
            cluster.fleet.set_members([PREFILL])
            await trio.sleep(0.1)
            cluster.fleet.set_members([PREFILL, FIRST])
        await trio.sleep(2.0)
        assert names(cluster) == {"prefill-0": "alive", "decode-0": "alive"}


async def test_without_members_requests_are_refused_until_there_are_some(
    autojump_clock: MockClock,
) -> None:
    async with running() as cluster:
        cluster.fleet.set_members([])
        await trio.sleep(2.0)
        assert names(cluster) == {}
        assert not cluster.fleet.status().is_ready
        with pytest.raises(RequestError, match="no decode worker is available"):
            cluster.fleet.submit(make_request(1, max_tokens=10))
        cluster.fleet.set_members([PREFILL, FIRST])
        await cluster.fleet.wait_ready()
        token_ids, end = await read_all(cluster.fleet.submit(make_request(1, max_tokens=10)))
        assert (token_ids, type(end)) == (completion_ids(0, 10), Finished)


async def test_nothing_stays_of_workers_that_have_left(autojump_clock: MockClock) -> None:
    def num_workers() -> int:
        gc.collect()
        return sum(type(one) is Worker for one in gc.get_objects())

    async with running() as cluster:
        before = num_workers()
        await second(cluster)
        for _ in range(3):
            # One that answers, one that does not exist.
            cluster.fleet.set_members([PREFILL, FIRST, SECOND, (Role.DECODE, "mem://nowhere")])
            await trio.sleep(2.0)
            await read_all(cluster.fleet.submit(make_request(1, max_tokens=10)))
            cluster.fleet.set_members([PREFILL, FIRST])
            await trio.sleep(2.0)
        assert num_workers() == before


async def test_twenty_changes_under_load_cost_no_stream(autojump_clock: MockClock) -> None:
    async with running() as cluster:
        await second(cluster)
        ended: list[type] = []

        async def client(number: int) -> None:
            stream = cluster.fleet.submit(make_request(number, max_tokens=200, seed=number))
            token_ids, end = await read_all(stream)
            assert token_ids == completion_ids(number, 200)
            ended.append(type(end))

        async with trio.open_nursery() as clients:
            for number in range(12):
                clients.start_soon(client, number)
            for change in range(20):
                cluster.fleet.set_members([PREFILL, (FIRST, SECOND)[change % 2]])
                await trio.sleep(0.3)
        assert ended == [Finished] * 12
        await trio.sleep(2.0)
        assert set(names(cluster)) == {"prefill-0", "decode-1"}
        cluster.fleet.check_accounting()


def test_a_file_of_members_is_read_as_it_was_written() -> None:
    own = (Member(Role.DECODE, "ipc:///x/d"), Member(Role.PREFILL, "tcp://h:1", "chat"))
    adapter = AdapterConfig("sql", "/a", "", "sha256:" + "0" * 64)
    chat = ServedModelConfig("chat", "/m", aliases=("*",), adapters=(adapter,))
    members = Members(own, (chat, ServedModelConfig("code", "/c", tool_parser=ToolParser.HERMES)))
    assert read_members(written_members(Members(own)), "F") == Members(own)
    assert b"models" not in written_members(Members(own))
    assert read_members(written_members(members), "F") == members


def test_versions_with_one_compute_digest_may_have_the_same_workers() -> None:
    members = tuple(Member(Role.DECODE, "a", name) for name in ("old", "new"))

    def file(*digests: str) -> bytes:
        names = ("old", "new")
        models = (
            ServedModelConfig(name, f"/{name}", compute_digest=digest)
            for name, digest in zip(names, digests, strict=True)
        )
        return written_members(Members(members, tuple(models)))

    assert read_members(file("c", "c"), "F").members == members
    for digests in (("c", "d"), ("", ""), ("c", "")):
        with pytest.raises(ConfigError, match="names a twice"):
            read_members(file(*digests), "F")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"nonsense", "F is not a list of members: JSON is malformed"),
        (b'{"members": [{"role": "decode"}]}', "missing required field `address`"),
        (b'{"members": [{"role": "server", "address": "a"}]}', r"members\[0\].role is 'server'"),
        (b'{"members": [], "zone": 1}', "unknown field `zone`"),
        (
            written_members(Members((Member(Role.DECODE, "a"), Member(Role.PREFILL, "a")))),
            "names a twice",
        ),
        (
            written_members(
                Members(tuple(Member(Role.DECODE, str(n)) for n in range(MAX_MEMBERS + 1)))
            ),
            "names 1025 members; allowed: 1024",
        ),
        (written_members(Members((), ())), "names 0 models; allowed: 1 to 64"),
        (
            written_members(Members((), (ServedModelConfig("a", "/1"),) * 2)),
            "names model 'a' twice",
        ),
        (
            b'{"members": [], "models": [{"name": "a", "model_dir": "/a", "adapters": ['
            b'{"name": "/", "path": "/b", "base": "", "digest": ""}]}]}',
            "which is not an adapter name",
        ),
    ],
)
def test_a_file_with_an_error_counts_for_nothing(content: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_members(content, "F")


def test_each_model_has_its_members_and_an_unknown_one_is_an_error() -> None:
    own = Members(
        (
            Member(Role.DECODE, "a"),
            Member(Role.DECODE, "b", "chat"),
            Member(Role.PREFILL, "c", "x"),
        )
    )
    assert by_model(own, ["chat", "x", "y"]) == {
        "chat": [(Role.DECODE, "a"), (Role.DECODE, "b")],
        "x": [(Role.PREFILL, "c")],
        "y": [],
    }
    with pytest.raises(
        ConfigError, match="the member at c has the model 'x', but this server has chat"
    ):
        by_model(own, ["chat"])
    # If the file names models, those count, even if they do not exist yet.
    x = msgspec.structs.replace(own, models=(ServedModelConfig("x", "/x"),))
    with pytest.raises(
        ConfigError, match="the member at b has the model 'chat', but this server has x"
    ):
        by_model(x, ["chat"])


async def test_the_last_good_file_stays_in_force(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    used: list[Members] = []
    one = Members((Member(Role.DECODE, "mem://1"),))
    both = Members((*one.members, Member(Role.DECODE, "mem://2")))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(MemberFile(str(path), POLL_S).run, used.append)
        await trio.sleep(4 * POLL_S)
        assert used == []
        path.write_bytes(written_members(one))
        await until(lambda: used == [one])
        path.write_bytes(b"nonsense, and longer")
        await trio.sleep(6 * POLL_S)
        path.unlink()
        await trio.sleep(6 * POLL_S)
        assert used == [one]
        path.touch()
        path.chmod(0o666)
        path.write_bytes(written_members(both))
        with capture_logs() as lines:
            await until(lambda: bool(lines))
        assert used == [one]
        assert ["others may have written it" in line["reason"] for line in lines] == [True]
        path.chmod(0o644)
        await until(lambda: used == [one, both])
        nursery.cancel_scope.cancel()
