"""What an answer is called: a digest of everything that it is a function of, and of whose it is.

Knows requests; knows no bounds and no time. Two requests have one name if and only if they are of
one tenant and salt, go to one model, and their answers cannot differ.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from transport.tokens import pack_tokens

if TYPE_CHECKING:
    from ..generation import GenerationRequest

NAME_BYTES: Final = 32


def name_of(request: GenerationRequest, fingerprint: str) -> bytes:
    """Return the name of a request's answer by the model with this fingerprint.

    Who asks, when, how urgently and for how long makes no difference to it; nor does the seed where
    the best token is always taken.
    """
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = replace(sampling, seed=0)
    asked = msgspec.msgpack.encode(
        (
            request.claim.tenant,
            request.cache_salt,
            fingerprint,
            sampling,
            request.stop,
            request.skip_special_tokens,
            request.include_stop,
            sorted(request.markers or ()),
            request.watch is not None,
        )
    )
    digest = blake2b(len(asked).to_bytes(8, "big"), digest_size=NAME_BYTES)
    digest.update(asked)
    digest.update(pack_tokens(request.prompt_ids))
    return digest.digest()
