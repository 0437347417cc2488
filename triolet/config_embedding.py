"""How a prefill worker batches inputs that become vectors, and what a server takes of them.

Knows numbers; who is in a batch is prefill/embedding_batches.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError
from .units import MILLISECONDS


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Dynamic batching of inputs on a prefill worker."""

    max_batch_tokens: int = 4096
    """Tokens of one batch; a step's own budget counts too. 1 computes inputs one by one."""
    max_wait_s: float = 3 * MILLISECONDS
    """How long an idle worker waits for company for an input: concurrent clients' next requests
    come within about so much after the answers to their last. A full batch waits for nobody."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < 1:
            raise ConfigError(f"max_batch_tokens is {self.max_batch_tokens}; allowed: >= 1")
        if not 0 <= self.max_wait_s <= 1.0:
            raise ConfigError(f"embedding max_wait_s is {self.max_wait_s}; allowed: 0…1")


@dataclass(frozen=True, slots=True)
class EmbeddingLimits:
    """What a server takes of one request for vectors, and of all together."""

    max_inputs: int = 2048
    """Inputs of one request: as many as the API's own."""
    max_documents: int = 1000
    """Documents of one request for a ranking, pairs of one for scores: as many as Cohere's API
    takes. Each is an input, and its score takes a product of two vectors on the event loop."""
    max_request_tokens: int = 300_000
    """Of all its inputs together: as many as the API's own."""
    max_waiting_inputs: int = 16_384
    """That wait for a worker, of all requests; about 1 KiB each plus their tokens."""
    credit_share: float = 0.25
    """Of a prefill worker's prompt credit: so much may be under way to it. Workers hold hardly any
    queue, so that fairness and cancels act in the server."""
