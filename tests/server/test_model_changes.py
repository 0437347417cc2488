"""Tests that a server's models follow the members file while requests run."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from server.api.resume import Name, ResumableAnswer
from server.api.served_models import ModelTable
from server.api.services import Services
from server.api.stream import WholeAnswer
from server.contract.generation import Failed, Finished
from server.fleets import Fleets, read_files
from server.metrics.metrics import Metrics
from server.model_changes import ModelChanges, read_models
from server.scheduling.control_link import ControlLink
from server.tenants.opening import quotas_in_memory
from server.text.process import at_once
from tests.server.api.test_listening import a_stream
from tests.server.scheduling.fake_processes import FakeProcess
from tests.server.scheduling.fakes import FakeDecode, FakePrefill, make_request, server_config
from tests.server.scheduling.test_fleet import read_all, read_some
from transport.memory_network import MemoryNetwork
from triolet.adapter_keys import adapters_mark, digest_bytes
from triolet.config import (
    ANY_MODEL,
    AdapterConfig,
    ResponseCacheConfig,
    ResumeConfig,
    ServedModelConfig,
)
from triolet.config.members import Member, Members, written_members
from triolet.errors import ConfigError, RequestError
from triolet.ids import Role
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio.testing import MockClock

DEMO = str(Path(__file__).parents[2] / "triolet" / "demo")
CHAT = ServedModelConfig(
    "chat", DEMO, prefill_addresses=("mem://prefill-0",), decode_addresses=("mem://decode-0",)
)
CODE = ServedModelConfig("code", DEMO, aliases=("coder",), decode_addresses=("mem://code",))
SQL = AdapterConfig("sql", "/sql", "", "sha256:" + "a" * 64)
PATIENCE_S = 60.0
DRAIN_S = 1.0
SWEPT_S = 0.1
"""Time within which a passed deadline is noticed."""


class Scene:
    """A server with the model `chat` and fake in-memory workers."""

    def __init__(self, nursery: trio.Nursery, **settings: object) -> None:
        config = server_config(models=(CHAT,), drain_timeout_s=DRAIN_S, **settings)
        self.network = MemoryNetwork()
        self.metrics = Metrics("chat", "vllm")
        self.names: dict[str, tuple[str, ...]] = {}
        quotas = quotas_in_memory()
        self.fleets = Fleets(config, self.network, self.metrics, quotas, self.names, at_once)
        [own] = config.of_models
        model = self.fleets.add(own, read_files(own, at_once), is_only=True)
        self.services = Services(config, ModelTable([model]), self.metrics, quotas=quotas)
        self.metrics.watch(self.fleets.by_model["chat"].status, lambda: 0)
        self.changes = ModelChanges(self.services, self.fleets, nursery)
        self.nursery = nursery
        self.decodes = [FakeDecode()]
        self.decode_process = FakeProcess(self.network, self.decodes[0])
        self.changes.link = ControlLink(
            config, self.network, "server", self.fleets.by_model, self.changes.refused
        )

    @property
    def listed(self) -> list[str]:
        return self.services.models.names

    def use(self, *models: ServedModelConfig) -> None:
        members = [
            Member(role, address, model.name)
            for model in models
            for role, addresses in (
                (Role.PREFILL, model.prefill_addresses),
                (Role.DECODE, model.decode_addresses),
            )
            for address in addresses
        ]
        self.changes.use(Members(tuple(members), models))

    async def until(self, is_so: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE_S):
            while True:
                if is_so():
                    return
                await trio.sleep(0.01)

    async def restart_decode(self) -> None:
        """Kill the decode worker, and start it again."""
        self.decode_process.kill()
        await trio.testing.wait_all_tasks_blocked()
        self.decodes[:] = [FakeDecode(epoch=self.decodes[0].epoch + 1)]
        self.decode_process = FakeProcess(self.network, self.decodes[0])
        await self.nursery.start(self.decode_process.run)

    def labels(self) -> set[str]:
        """Return the models in a scrape, by their counters of sequences."""
        lines = self.metrics.exposition().decode().splitlines()
        counted = [line for line in lines if line.startswith("triolet_requests_received_total")]
        return {line.partition('model="')[2].partition('"')[0] for line in counted}


@asynccontextmanager
async def scene(**settings: object) -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        one = Scene(nursery, **settings)
        await nursery.start(one.decode_process.run)
        await nursery.start(FakeProcess(one.network, FakePrefill(), one.decodes).run)
        await one.changes.start()
        await one.fleets.by_model["chat"].wait_ready()
        yield one
        nursery.cancel_scope.cancel()


async def test_a_model_comes_and_goes_and_the_other_answers() -> None:
    async with scene(response_cache=ResponseCacheConfig(max_bytes=MIB)) as one:
        chat = one.services.models.named("chat")
        assert one.labels() == {""}
        one.use(CHAT, CODE)
        assert one.listed == ["chat"], "it is read in a thread"
        await one.until(lambda: one.listed == ["chat", "code", "coder"])
        assert one.services.models.named("coder").fleet.status().workers[0].address == "mem://code"
        assert one.labels() == {"chat", "code"}
        assert one.names["code"] == ("code", "coder")
        one.metrics.fleets["code"].counters["requests_received"].inc(3)
        one.use(CHAT)
        with pytest.raises(RequestError, match="there is no model 'code'; there is chat"):
            one.services.models.named("code")
        await one.until(lambda: "code" not in one.fleets.by_model)
        assert one.labels() == {""}
        assert b'="code"' not in one.metrics.exposition()
        assert one.metrics.figures()["requests_received"] == {"": 3.0}, (
            "set by the server, permanently"
        )
        assert one.services.models.named("chat") is chat
        assert set(one.names) == {"chat"}


async def test_the_first_model_may_go_and_the_last_one_stays() -> None:
    async with scene() as one:
        one.use(CODE)
        await one.until(lambda: one.listed == ["code", "coder"])
        assert one.services.models.named(None).name == "code"
        await one.until(lambda: [*one.fleets.by_model] == ["code"])


async def test_what_runs_ends_in_time_and_is_told_why(autojump_clock: MockClock) -> None:
    async with scene() as one:
        # First, because it reads files in a thread while virtual time advances.
        await one.changes._read(CODE, one.changes._serve)
        links = one.fleets.by_model["chat"]
        short = links.submit(make_request(1, max_tokens=20))
        endless = links.submit(make_request(2, max_tokens=1000, seed=2))
        await read_some(endless, 3)
        one.use(CODE)
        await trio.sleep(0.01)
        with pytest.raises(RequestError, match="model chat was removed") as refused:
            links.submit(make_request(3))
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
        _, end = await read_all(short)
        assert isinstance(end, Finished)
        began = trio.current_time()
        _, end = await read_all(endless)
        assert isinstance(end, Failed)
        assert end.error.code == "model_not_found"
        assert trio.current_time() - began <= DRAIN_S + SWEPT_S
        await trio.sleep(1.0)
        assert [*one.fleets.by_model] == ["code"]


async def test_a_model_that_cannot_be_read_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    async with scene() as one:
        nowhere = replace(CODE, model_dir=str(tmp_path / "none"))
        with capture_logs() as lines:
            one.use(CHAT, nowhere)
            await one.until(lambda: "code" in one.changes.refused)
            one.use(CHAT, nowhere)
        assert [line["event"] for line in lines] == ["model_refused"], "it is read once"
        assert "does not exist" in one.changes.refused["code"]
        assert (one.listed, one.labels(), [*one.fleets.by_model]) == (["chat"], {""}, ["chat"])
        one.use(CHAT, CODE)
        await one.until(lambda: "code" in one.listed)
        assert one.changes.refused == {}
        one.use(CHAT, replace(CODE, name="more", aliases=("chat",)))
        await one.until(lambda: "more" in one.changes.refused)
        one.use(CHAT)
        assert one.changes.refused == {}


async def test_a_name_that_another_model_answers_to_is_refused() -> None:
    async with scene() as one:
        one.use(CHAT, replace(CODE, aliases=("chat",)))
        await one.until(lambda: "code" in one.changes.refused)
        assert "two models are called 'chat'" in one.changes.refused["code"]
        assert (one.listed, [*one.fleets.by_model]) == (["chat"], ["chat"])
        assert [*one.metrics.fleets] == ["chat"]


async def test_what_was_kept_of_a_model_is_not_kept_for_the_next_of_its_name() -> None:
    async with scene() as one:
        one.use(CHAT, CODE)
        await one.until(lambda: "code" in one.listed)
        kept, config = one.services.kept, ResumeConfig()
        names = {model: Name("", b"", model) for model in ("chat", "code", "code:poet")}
        for model, name in names.items():
            answer = ResumableAnswer(WholeAnswer(1, lambda _: b""), b"", config, model)
            kept.begin(name, answer, lambda: a_stream()[0])
        one.use(CHAT)
        await one.until(lambda: "code" not in one.fleets.by_model)
        one.use(CHAT, CODE)
        await one.until(lambda: "code" in one.listed)
        assert [model for model, name in names.items() if kept.find(name)] == ["chat"]


async def test_another_model_of_the_same_name_takes_its_place() -> None:
    async with scene() as one:
        one.use(CHAT, CODE)
        await one.until(lambda: "code" in one.listed)
        before = one.fleets.by_model["code"]
        one.use(CHAT, replace(CODE, aliases=()))
        await one.until(lambda: one.listed == ["chat", "code"])
        assert one.fleets.by_model["code"] is not before


async def test_an_adapter_comes_and_goes_while_requests_of_its_model_run(
    autojump_clock: MockClock,
) -> None:
    workers = {
        "prefill_addresses": ("mem://prefill-0", "mem://prefill-1"),
        "decode_addresses": ("mem://decode-0", "mem://decode-1"),
    }
    plain = replace(CHAT, **workers)  # type: ignore[arg-type]
    with_both = f"tiny/f32{adapters_mark([digest_bytes(SQL.digest)])}"
    async with scene() as one, trio.open_nursery() as nursery:
        links = one.fleets.by_model["chat"]
        base = links.submit(make_request(1, max_tokens=1000))
        await read_some(base, 3)
        decode = FakeDecode("decode-1", fingerprint=with_both)
        prefill = FakePrefill("prefill-1", fingerprint=with_both)
        await nursery.start(FakeProcess(one.network, decode).run)
        await nursery.start(FakeProcess(one.network, prefill, [decode]).run)
        one.use(plain)
        await trio.sleep(3.0)
        states = {worker.address: worker.state for worker in links.status().workers}
        assert states["mem://decode-1"] != "alive", "its adapters differ from this server's"
        one.use(replace(plain, unnamed_adapters=(SQL,)))
        assert (one.listed, links.adapters.held) == (["chat"], ())
        await one.until(lambda: {worker.state for worker in links.status().workers} == {"alive"})
        one.use(replace(plain, adapters=(SQL,)))
        assert (one.listed, links.adapters.held) == (["chat", "chat:sql"], (SQL.digest,))
        assert one.fleets.by_model["chat"] is links
        sql = one.services.models.named("chat:sql")
        requests = [
            replace(make_request(n, max_tokens=1000), adapter=sql.adapter_key) for n in (2, 3)
        ]
        own = links.submit(requests[0])
        await read_some(own, 3)
        assert len(decode.rows) == 1, "the other worker does not have it"
        name = Name("", b"", "sql")
        answer = ResumableAnswer(WholeAnswer(1, lambda _: b""), b"", ResumeConfig(), "chat:sql")
        one.services.kept.begin(name, answer, lambda: a_stream()[0])
        one.use(replace(plain, unnamed_adapters=(SQL,)))
        assert one.services.kept.find(name) is None
        for unknown in (one.services.models.named, lambda _: links.submit(requests[1])):
            with pytest.raises(RequestError) as refused:
                unknown("chat:sql")
            assert (refused.value.status, refused.value.code) == (404, "model_not_found")
        assert links.adapters.held == (SQL.digest,), "a request still uses it"
        began = trio.current_time()
        _, end = await read_all(own)
        assert isinstance(end, Failed)
        assert end.error.code == "model_not_found"
        assert "chat:sql was removed" in end.error.message
        assert trio.current_time() - began + SWEPT_S >= DRAIN_S
        assert links.adapters.held == ()
        one.use(plain)
        await read_some(base, 3)
        nursery.cancel_scope.cancel()


async def test_answers_of_one_of_two_names_of_an_adapter_are_forgotten_with_it() -> None:
    async with scene() as one:
        one.use(replace(CHAT, adapters=(SQL, replace(SQL, name="other"))))
        for name in ("sql", "other"):
            answer = ResumableAnswer(
                WholeAnswer(1, lambda _: b""), b"", ResumeConfig(), f"chat:{name}"
            )
            one.services.kept.begin(Name("", b"", name), answer, lambda: a_stream()[0])
        one.use(replace(CHAT, adapters=(SQL,)))
        assert one.services.kept.find(Name("", b"", "other")) is None
        assert one.services.kept.find(Name("", b"", "sql")) is not None


async def test_an_adapter_with_the_name_of_a_model_is_refused() -> None:
    async with scene() as one:
        one.use(CHAT, replace(CODE, aliases=("chat:sql",)))
        await one.until(lambda: "chat:sql" in one.listed)
        with capture_logs() as lines:
            one.use(replace(CHAT, adapters=(SQL,)), replace(CODE, aliases=("chat:sql",)))
        assert [line["event"] for line in lines] == ["adapters_refused"]
        assert one.services.models.named("chat:sql").base_name == "code"


async def test_a_name_of_an_adapter_that_was_unloaded_means_no_base() -> None:
    """Even if the base answers to every name, and after a restart of the server."""
    async with scene() as one:
        chat = replace(CHAT, aliases=("gpt-4o", ANY_MODEL))
        one.use(CODE, replace(chat, adapters=(SQL,)))
        await one.until(lambda: one.services.models.takes_any_name)
        one.use(CODE, chat)
        restarted = ModelTable([*one.services.models])
        for table in (one.services.models, restarted):
            assert table.named("llama3:8b").name == "chat"
            for name in ("chat:sql", "gpt-4o:sql"):
                with pytest.raises(RequestError, match=f"there is no model '{name}'"):
                    table.named(name)


def test_a_server_that_starts_has_the_models_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    config = server_config(models=(CHAT,), members_file=str(path))
    assert read_models(config, at_once)[0].models == (CHAT,)
    bad = replace(CODE, name="bad", model_dir=str(tmp_path))
    path.write_bytes(written_members(Members((), (CODE, bad))))
    with capture_logs() as lines:
        found, files, left_out, _ = read_models(config, at_once)
    assert (found.models, [*files], left_out) == ((CODE,), ["code"], {"bad"})
    assert [line["model"] for line in lines if line["event"] == "model_refused"] == ["bad"]
    path.write_bytes(written_members(Members((), (CODE, replace(bad, name="chat")))))
    with pytest.raises(ConfigError, match="is missing"):
        read_models(config, at_once)
    worse = replace(bad, name="worse")
    path.write_bytes(written_members(Members((), (bad, worse))))
    with pytest.raises(ConfigError, match="is missing"):
        read_models(config, at_once)
    path.write_bytes(b"nonsense")
    assert read_models(config, at_once)[0].models == (CHAT,)
