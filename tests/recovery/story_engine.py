"""A fake engine that writes text, and that can be killed by what it is given.

Its tokens are the bytes of a story with characters of one to four bytes, so that text and stop
strings mean something. Where it goes on depends on prompt, seed, position and sampling; with any
byte of KV wrong it writes `#` instead.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from engine.batch import Sampled
from tests.server.scheduling.fakes import STORY
from tests.server.tiny_text import PAD_ID
from tests.worker.fake_engine import FakeEngine
from transport.tokens import pack_tokens, unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import SampleSpec, StepRow

VOCAB_SIZE = PAD_ID + 1
BYTES = STORY.encode()
WRONG = ord("#")
BIASED = ord("_")
POISON = 7
"""A byte in a prompt that an engine may die of."""


class Deadly(Exception):
    """The end of the process, where a real one would get a signal."""


class StoryEngine(FakeEngine):
    """See the file's head.

    Attributes:
      dies_of: a prompt with this byte ends the process with the first row that has it.
      chokes_on: the same, but the step raises and the process lives.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, block_size=4, max_model_len=512, fingerprint="story")
        self.vocab_size = VOCAB_SIZE
        self.dies_of: int | None = None
        self.chokes_on: int | None = None

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        for row in rows:
            seen = (*row.token_ids, *(row.sample.prompt_ids if row.sample else ()))
            if self.dies_of in seen:
                raise Deadly
            if self.chokes_on in seen:
                raise RuntimeError("this engine was told to choke")
        return super().step(rows)

    def _sample(self, row: StepRow, sample: SampleSpec) -> Sampled:
        known = [*sample.prompt_ids, *sample.output_ids]
        end = row.start + len(row.token_ids)
        is_right = self._tokens(row.block_table, end) == known
        token_id = _next_token(sample) if is_right else WRONG
        num_top = sample.params.logprobs
        if num_top is None:
            return Sampled(token_id)
        top = tuple(((token_id + i) % 256, -0.25 * i - 0.001 * end) for i in range(num_top))
        return Sampled(token_id, -0.001 * end - token_id / 256, top)

    def _tokens(self, block_table: Sequence[int], end: int) -> list[int]:
        num_blocks = -(-end // self.block_size)
        kept = b"".join(self._pool[block] for block in block_table[:num_blocks])
        return list(unpack_tokens(kept[: 4 * end]))


def _next_token(sample: SampleSpec) -> int:
    params = sample.params
    prompt = pack_tokens(sample.prompt_ids)
    at = _digest(prompt + params.seed.to_bytes(8, "little")) + sample.position
    if params.has_penalties:
        at += len(set(sample.output_ids)) // 7
    if params.temperature > 0:
        at += _digest(f"{params.seed}/{sample.position // 20}".encode()) % 5
    token_id = BYTES[at % len(BYTES)]
    biased = {token for token, bias in params.logit_bias if bias < 0}
    stops = params.stop_token_ids if sample.position < params.min_tokens else ()
    return BIASED if token_id in biased or token_id in stops else token_id


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")
