"""Scripts for the scripted engine in tests of recovery: one that writes text, and prompts that
crash the engine.

Its tokens are the bytes of a story with characters of one to four bytes, so that text and stop
strings are tested as with a real model. The next byte depends on prompt, seed, position and
sampling. If any byte of KV is wrong, the script writes `#` instead.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from engine.batch import Sampled
from simulation.engine import kv_of
from tests.server.scheduling.fakes import STORY
from tests.server.tiny_text import PAD_ID
from tests.worker.scripts import scripted_engine
from transport.tokens import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.batch import SampleSpec, StepRow
    from simulation.engine import ScriptedEngine

VOCAB_SIZE = PAD_ID + 1
BYTES = STORY.encode()
WRONG = ord("#")
BIASED = ord("_")
POISON = 7
"""A byte in a prompt that an engine may die of."""


class Deadly(Exception):
    """The end of the process, where a real one would get a signal."""


def story_engine(num_blocks: int) -> ScriptedEngine:
    """Return an engine that tells the story."""
    return scripted_engine(
        num_blocks, _tell, max_model_len=512, vocab_size=VOCAB_SIZE, fingerprint="story"
    )


def dying_of(byte: int, how: type[Exception]) -> Callable[[Sequence[StepRow]], None]:
    """Return a function that raises before the first step with a prompt that contains this byte."""

    def look(rows: Sequence[StepRow]) -> None:
        for row in rows:
            if byte in (*row.token_ids, *(row.sample.prompt_ids if row.sample else ())):
                raise how

    return look


def _tell(kv: bytes, sample: SampleSpec) -> Sampled:
    known = [*sample.prompt_ids, *sample.output_ids]
    token_id = _next_token(sample) if kv == kv_of(known) else WRONG
    num_top = sample.params.logprobs
    if num_top is None:
        return Sampled(token_id)
    end = len(known)
    top = tuple(((token_id + i) % 256, -0.25 * i - 0.001 * end) for i in range(num_top))
    return Sampled(token_id, -0.001 * end - token_id / 256, top)


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
