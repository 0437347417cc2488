"""Tests of two versions of one model behind one server: each answers with its own tokens, and no
worker is used for the wrong version."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import trio

from server.contract.generation import Delta
from server.fleets import Fleets, ModelFiles
from server.metrics.metrics import Metrics
from server.scheduling.links import Links
from server.scheduling.status import Observer
from server.tenants.opening import quotas_in_memory
from server.text.model_files import EmbeddingModel, ModelCard, PageWords, SamplingDefaults
from server.text.process import at_once
from tests.server.scheduling.fakes import make_request, server_config
from tests.server.tiny_text import tiny_text
from transport.frames import Capacity, Goodbye, Peer, Welcome
from transport.handshake import check_version, version_of, versioned
from transport.memory_network import MemoryNetwork
from triolet.adapter_keys import adapters_mark
from triolet.config import ServedModelConfig
from triolet.ids import PeerId, Role

from .fleet import SERVE, FakeDevice, worker_config
from .scripts import completion, hashes, scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triolet.config import ServerConfig
    from worker.worker_loop import WorkerLoop

OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64
SALTS = {OLD: 100, NEW: 200}
"""By which the tokens of the versions differ."""
ADDRESSES = {
    (digest, role): f"memory:{name}.{role}"
    for name, digest in (("old", OLD), ("new", NEW))
    for role in (Role.PREFILL, Role.DECODE)
}
NUM_TOKENS = 12


class Refusals(Observer):
    """Records why workers were refused."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}
        self.was_again: list[bool] = []

    def worker_refused(self, worker: str, reason: str, *, is_again: bool = False) -> None:
        self.reasons[worker] = reason
        self.was_again.append(is_again)


@dataclass
class Host:
    """Workers of both versions on one network."""

    network: MemoryNetwork
    loops: dict[tuple[str, Role], WorkerLoop]
    nursery: trio.Nursery

    async def links(self, config: ServerConfig, observer: Observer | None = None) -> Links:
        """Run a server's side of one model."""
        name = f"server.{config.model_name}"
        links = Links(config, tiny_text(), self.network, observer, name, takes_unversioned=False)
        await self.nursery.start(links.run)
        return links


@asynccontextmanager
async def both_versions() -> AsyncIterator[Host]:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        loops: dict[tuple[str, Role], WorkerLoop] = {}
        for (digest, role), address in ADDRESSES.items():
            config = replace(worker_config(role), control_address=address, compute_digest=digest)
            if role is Role.DECODE:
                config = replace(config, kv_address=f"{address}.kv")
            engine = scripted_engine(says=hashes(SALTS[digest]))
            loops[digest, role] = await nursery.start(
                SERVE[role], config, engine, FakeDevice(), network, network
            )
        yield Host(network, loops, nursery)
        nursery.cancel_scope.cancel()


def config_of(name: str, digest: str, prefill: str, decode: str, version: str = "") -> ServerConfig:
    """Return the settings for one model, as a server with several makes them.

    Args:
      name: of the model.
      digest: compute digest of its version.
      prefill: digest of the version at the address of its prefill worker.
      decode: likewise.
      version: digest of the version, where that is another one.
    """
    one = ServedModelConfig(
        name=name,
        model_dir="tiny",
        digest=version or digest,
        compute_digest=digest,
        prefill_addresses=(ADDRESSES[prefill, Role.PREFILL],),
        decode_addresses=(ADDRESSES[decode, Role.DECODE],),
    )
    [config] = server_config(models=(one,)).of_models
    return config


def reference(digest: str, number: int) -> list[int]:
    """Return a version's answer to a prompt when it runs alone."""
    return completion(prompt_of(number).encode(), number + SALTS[digest], NUM_TOKENS)


def prompt_of(number: int) -> str:
    return f"{number} " + "x" * (3 * number)


async def tokens_of(links: Links, number: int, into: dict[object, list[int]], key: object) -> None:
    request = make_request(number, prompt=prompt_of(number), max_tokens=NUM_TOKENS, seed=number)
    into[key] = []
    async for events in links.submit(request):
        for _, event in events:
            if isinstance(event, Delta):
                into[key] += event.token_ids


async def test_each_version_answers_with_its_own_tokens(autojump_clock: object) -> None:
    async with both_versions() as host:
        links = {
            digest: await host.links(config_of(name, digest, digest, digest))
            for name, digest in (("old", OLD), ("new", NEW))
        }
        for one in links.values():
            await one.wait_ready()
        found: dict[object, list[int]] = {}
        async with trio.open_nursery() as nursery:
            for number in range(8):
                for digest, one in links.items():
                    nursery.start_soon(tokens_of, one, number, found, (digest, number))
        expected = {
            (digest, number): reference(digest, number) for digest in links for number in range(8)
        }
        assert found == expected
        assert expected[OLD, 1] != expected[NEW, 1]
        for one in links.values():
            one.check_accounting()
            assert {version_of(w.fingerprint) for w in one.status().workers} == (
                {OLD} if one is links[OLD] else {NEW}
            )


async def test_lines_of_batches_are_held_for_models_that_compute(autojump_clock: object) -> None:
    nowhere = ServedModelConfig("new", "tiny", NEW, (), ("memory:no",), ("memory:no",))
    config = config_of("old", OLD, OLD, OLD)
    addresses = _addresses_of(config)
    here = ServedModelConfig("old", "tiny", OLD, (), *addresses, compute_digest=OLD)
    config = replace(config, models=(here, nowhere))
    async with both_versions() as host:
        metrics = Metrics("old", "none", "new")
        fleets = Fleets(config, host.network, metrics, quotas_in_memory(), {}, at_once)
        parts = SamplingDefaults(), EmbeddingModel(), ModelCard(), PageWords()
        files = ModelFiles(tiny_text(), *parts)
        fleets.add_all(config, {"old": files, "new": files})
        for fleet in fleets:
            await host.nursery.start(fleet.run)
        await fleets.by_model["old"].wait_ready()
        assert fleets.hold_s() == 0.0
        fleets.by_model["new"].hold_s = lambda: math.inf
        assert fleets.hold_s() == 0.0, "its requests wait for workers, not for cores"
        fleets.by_model["old"].hold_s = lambda: 0.5
        assert fleets.hold_s() == 0.5
        with trio.fail_after(5.0):
            await fleets.drain()


async def test_a_version_that_computes_alike_takes_the_workers_and_their_kv(
    autojump_clock: object,
) -> None:
    changed = "sha256:" + "2" * 64  # differs from OLD in a sampling default
    cached_tokens = []
    async with both_versions() as host:
        for version in (OLD, changed):
            links = await host.links(config_of("chat", OLD, OLD, OLD, version))
            await links.wait_ready()
            request = make_request(7, prompt=prompt_of(7), max_tokens=NUM_TOKENS, seed=7)
            outputs = [event async for events in links.submit(request) for _, event in events]
            tokens = [one for event in outputs[:-1] for one in event.token_ids]
            assert (links.version, tokens) == (version, reference(OLD, 7))
            cached_tokens.append(outputs[-1].usage.cached_tokens)
    assert cached_tokens[0] == 0 < cached_tokens[1]


def _addresses_of(config: ServerConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return config.prefill_addresses, config.decode_addresses


@pytest.mark.parametrize("crossed", [Role.PREFILL, Role.DECODE, None])
async def test_a_worker_of_another_version_is_refused_at_any_address(
    crossed: Role | None, autojump_clock: object
) -> None:
    at = {role: OLD if crossed in (role, None) else NEW for role in (Role.PREFILL, Role.DECODE)}
    refusals = Refusals()
    async with both_versions() as host:
        old = await host.links(config_of("old", OLD, OLD, OLD))
        crossed_config = config_of("new", NEW, at[Role.PREFILL], at[Role.DECODE])
        new = await host.links(crossed_config, refusals)
        await old.wait_ready()
        await trio.sleep(5.0)
        wrong = [role for role, digest in at.items() if digest == OLD]
        assert {str(w.role) for w in new.status().workers if w.trouble} == set(map(str, wrong))
        assert len(refusals.reasons) == len(wrong)
        for reason in refusals.reasons.values():
            assert OLD in reason
            assert f"a worker of new, which is {NEW}" in reason
        found: dict[object, list[int]] = {}
        # Decode alone computes prompts itself, and no other worker takes its place.
        is_served = crossed is Role.PREFILL
        assert new.status().is_ready is is_served
        await tokens_of(old, 3, found, OLD)
        if is_served:
            await tokens_of(new, 3, found, NEW)
            assert found[NEW] == reference(NEW, 3)
        assert found[OLD] == reference(OLD, 3)
        # The workers of the other version are the other server's alone, credit and all.
        for role in wrong:
            known = host.loops[OLD, role]._core.server_sessions.servers.known()
            assert [peer.name for _, peer in known] == ["server.old"]


async def test_streams_go_on_when_a_worker_of_another_version_is_announced(
    autojump_clock: object,
) -> None:
    refusals = Refusals()
    async with both_versions() as host:
        old = await host.links(config_of("old", OLD, OLD, OLD), refusals)
        await old.wait_ready()
        found: dict[object, list[int]] = {}
        async with trio.open_nursery() as streams:
            streams.start_soon(tokens_of, old, 3, found, OLD)
            await trio.sleep(0.0)
            old.set_members([(role, address) for (_, role), address in ADDRESSES.items()])
        await trio.sleep(60.0)
        await tokens_of(old, 3, found, NEW)
        assert found[OLD] == found[NEW] == reference(OLD, 3)
        # Each worker is logged once and counted at every attempt.
        assert refusals.was_again.count(False) == 2
        assert len(refusals.was_again) > 4
        assert len(refusals.reasons) == 2


def test_what_a_worker_computes_with_is_no_version() -> None:
    for fingerprint in ("a/b", "0123:by=torch,NVIDIA/H100", "sha256:12/x", ""):
        assert version_of(versioned(fingerprint, "")) == ""
        assert version_of(versioned(fingerprint, OLD)) == OLD


@pytest.mark.parametrize(
    ("theirs", "ours", "takes_unversioned", "is_taken"),
    [
        (OLD, OLD, False, True),
        (OLD, NEW, False, False),
        (OLD, NEW, True, False),
        ("", NEW, False, False),
        ("", NEW, True, True),
        (OLD, "", False, False),
        (OLD, "", True, True),
        ("", "", False, True),
    ],
)
def test_versions_have_to_be_equal_and_beside_others_named(
    theirs: str, ours: str, takes_unversioned: bool, is_taken: bool
) -> None:
    worker, server = PeerId(Role.DECODE, "decode-0", 1), PeerId(Role.SERVER, "server", 2)
    welcome = Welcome(Peer.of(worker), 1, versioned("fake", theirs), Capacity(1, 1, 1, 1, 1, 1, 1))
    answer = check_version(
        welcome, me=server, model="chat", compute_digest=ours, takes_unversioned=takes_unversioned
    )
    assert (answer is None) is is_taken
    if not is_taken:
        assert isinstance(answer, Goodbye)
        assert "decode-0" in answer.reason


def test_a_server_takes_workers_with_its_own_adapters_alone() -> None:
    worker, server = PeerId(Role.PREFILL, "prefill-0", 1), PeerId(Role.SERVER, "server", 2)
    first, second = (bytes([number]) * 32 for number in (1, 2))
    marks = [adapters_mark(one) for one in ([], [first], [second, first])]
    for theirs in marks:
        fingerprint = versioned(f"weights:by=native{theirs}", OLD)
        welcome = Welcome(Peer.of(worker), 1, fingerprint, Capacity(1, 1, 1, 1, 1, 1, 1))
        assert version_of(fingerprint) == OLD
        for ours in marks:
            answer = check_version(
                welcome,
                me=server,
                model="chat",
                compute_digest=OLD,
                takes_unversioned=False,
                adapters=(ours,),
            )
            assert (answer is None) is (theirs == ours)
            if answer is not None:
                assert "has other LoRA adapters than" in answer.reason
