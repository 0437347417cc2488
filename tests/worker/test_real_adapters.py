"""Tests of LoRA adapters over real engines and sockets: workers never share KV between adapters,
neither in the pool nor in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from store.adapter_files import read_adapter
from tests.adapters import write_adapter, write_merged
from tests.engine.checkpoints import write_checkpoint
from tests.engine.driver import generate, ids, open_engine
from transport import frames
from triolet.adapter_keys import digest_bytes
from triolet.config import AdapterConfig, Dtype, EngineConfig
from triolet.errors import RemoteProtocolError
from triolet.ids import PeerId, Role
from triolet.sampling import SamplingParams
from triolet.units import MIB
from worker.engine_port import require_adapter
from worker.local_engine import LocalEngine

from .real import open_engines, open_workers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NUM_TOKENS = 10
PROMPT = [3 + 7 * i % 250 for i in range(70)]
OTHERS = [[5 + (11 * i + n) % 240 for i in range(70)] for n in range(3)]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


class Case:
    """A base, two adapters, and the answer of each to the prompt.

    Args:
      path: of a folder for all of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = write_checkpoint(path / "model", "llama").path
        plain = EngineConfig(dtype=Dtype.FLOAT32, kv_pool_bytes=4 * MIB)
        self.expected = {b"": self._alone(self.model, plain)}
        told = []
        for seed in (1, 2):
            adapter = write_adapter(path / f"a{seed}", self.model, seed)
            merged = write_merged(path / f"m{seed}", self.model, adapter)
            digest = read_adapter(adapter.path, "", 64).digest
            told.append(AdapterConfig(f"a{seed}", str(adapter.path), "", digest))
            self.expected[digest_bytes(digest)] = self._alone(merged, plain)
        self.adapters = tuple(told)
        self.restored: list[int] = []
        assert len({tuple(reply) for reply in self.expected.values()}) == 3

    @staticmethod
    def _alone(model: Path, config: EngineConfig) -> list[int]:
        [results] = generate(open_engine(model, config), [PROMPT], NUM_TOKENS)
        return ids(results)

    async def replies(self) -> list[tuple[bytes, list[int], int]]:
        """Return adapter, reply and cached tokens of the prompt: first with each adapter, then
        again with each while it is in the pool, and again once others have evicted it."""
        bytes_per_block = 16 * 2 * 2 * 2 * 16 * 4
        engine = EngineConfig(
            dtype=Dtype.FLOAT32,
            kv_pool_bytes=24 * bytes_per_block,
            host_cache_bytes=4 * MIB,
            adapters=self.adapters,
        )
        engines = open_engines(self.model, engine)
        kinds, found = list(self.expected), []
        asked = [(PROMPT, kind) for kind in 2 * kinds]
        asked += [(other, kind) for other in OTHERS for kind in kinds]
        asked += [(PROMPT, kind) for kind in kinds]
        async with open_workers(engines, self.model, engine, self.path) as client:
            for prompt, kind in asked:
                answer = await client.start(prompt, GREEDY, adapter=kind)
                await client.finish(answer)
                assert answer.first is not None
                if prompt is PROMPT:
                    cached_tokens = answer.first.cached_tokens
                    found.append((kind, answer.token_ids, cached_tokens))
        for local in engines.values():
            local.prefix_cache.check_invariants()
            self.restored.append(local.prefix_cache.counts.restored_blocks)
        return found


async def test_no_prefix_of_one_adapter_is_found_for_another(tmp_path: Path) -> None:
    case = Case(tmp_path)
    replies = await case.replies()
    assert [reply for _, reply, _ in replies] == 3 * list(case.expected.values())
    cached = [cached_tokens for *_, cached_tokens in replies]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 0, "each finds its own again"
    assert min(case.restored) > 0, "some of it in host memory"


async def test_without_the_adapter_in_the_key_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: only the key keeps adapters apart."""
    monkeypatch.setattr(frames, "cache_key", lambda salt, adapter: salt)
    case = Case(tmp_path)
    replies = await case.replies()
    assert [reply for _, reply, _ in replies] != 3 * list(case.expected.values())
    assert replies[1][2] > 0, "of the base's KV"


def test_an_engine_takes_only_adapters_that_it_has(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama").path
    local = LocalEngine(open_engine(model))
    me = PeerId(Role.DECODE, "decode-0", 1)
    require_adapter(local, b"", me)
    with pytest.raises(RemoteProtocolError, match="decode-0 has no adapter sha256:0101"):
        require_adapter(local, b"\1" * 32, me)
