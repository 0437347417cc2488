"""How KV travels from prefill to decode, beyond what every link has: each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import ConfigError


class KvWire(StrEnum):
    """What KV is on its way from prefill to decode.

    `int8` rounds it, by a scale per token and head: about half of bfloat16's bytes. Logits are then
    off by up to 3 % of their spread (root mean square), and the promises of exactness do not hold:
    an answer may depend on what the caches held and where it was computed. Both sides must agree.
    """

    EXACT = "exact"
    INT8 = "int8"


class MemorySharing(StrEnum):
    """Whether decode workers read KV where prefill has put it, instead of out of a socket.

    `auto`: wherever decode finds prefill's memory, which says that both see one host and belong to
    one user; everywhere else bytes travel. `on`: only there; whoever cannot is no peer. `off`:
    bytes travel always. Either side's word counts.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class WireConfig:
    """Ways to ship that are chosen, not needed."""

    share_memory: MemorySharing = MemorySharing.AUTO
    """Two to three times as fast as a socket, for half the CPU, and decided anew for each pair:
    what decode cannot open it is sent."""
    layer_groups: int = 1
    """Parts into which a prefill step's layers are divided: KV of the first ones leaves while the
    others are computed. 1: whole blocks leave after the step, which hides all shipping but the last
    step's where prompts are computed in chunks, as on a CPU. More pay where a step computes whole
    prompts and links are slow against it."""
    layer_group_min_tokens: int = 512
    """Only chunks of a prompt with at least so many tokens in a step go by layer groups: below,
    more and smaller frames cost more than they hide."""

    plaintext: bool = False
    """KV over tcp goes unencrypted, over connections without keys; CURVE moves 0.6 to 0.8 GB/s. For
    a trusted network: each chunk has a MAC by a key of its attempt, so nothing forged enters a
    pool, but KV can be read on its way. Both sides of a link must agree."""

    def __post_init__(self) -> None:
        for name in ("layer_groups", "layer_group_min_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: >= 1")
