"""Scripts of the scripted engine (simulation/engine.py) for tests of workers: the next token is a
hash of the seed and the KV that a step reads back."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from engine.batch import Sampled
from engine.pace import Pace
from simulation.engine import VOCAB_SIZE, ScriptedEngine, kv_of, tokens_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import SampleSpec
    from simulation.engine import Says

BLOCK_SIZE: Final = 4
BYTES_PER_BLOCK: Final = len(kv_of(range(BLOCK_SIZE)))
PACE: Final = Pace(8, step_s=0.0, target_s=1.0, least_tokens=8, most_tokens=8, chunk_tokens=8)


def follow(kv: bytes, seed: int) -> int:
    """Return the token that follows some KV: the reference for tests."""
    digest = hashlib.blake2b(kv + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def hashes(salt: int = 0, wrong_every: int = 0) -> Says:
    """Return a script.

    Args:
      salt: different for each model.
      wrong_every: tokens at multiples of this position are wrong, as from a draft model; 0 for
        none.
    """

    def says(kv: bytes, sample: SampleSpec) -> Sampled:
        is_wrong = wrong_every > 0 and len(tokens_in(kv)) % wrong_every == 0
        return Sampled((follow(kv, sample.params.seed + salt) + is_wrong) % VOCAB_SIZE)

    return says


def completion(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """Return the result of a whole greedy run."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(follow(kv_of(tokens), seed))
    return tokens[len(prompt) :]


class Fields(TypedDict, total=False):
    """Options of a scripted engine."""

    max_model_len: int
    vocab_size: int
    fingerprint: str
    host_bytes: int


def scripted_engine(
    num_blocks: int = 64, says: Says | None = None, **fields: Unpack[Fields]
) -> ScriptedEngine:
    """Return an engine with blocks of four tokens."""
    known: Fields = {"max_model_len": 256, "fingerprint": "fake", **fields}
    return ScriptedEngine(num_blocks, BLOCK_SIZE, PACE, says or hashes(), **known)
