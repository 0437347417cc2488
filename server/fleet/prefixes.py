"""Whose prefix cache probably holds how much of a prompt: the server's guess, by what went where.

Knows tokens, salts and the size of a worker's pool; asks nobody. A worker pushes out what was used
least recently, and so does the guess, which is never wrong about an answer: decode says in GRANT
what it holds, and prefill finds what it finds. Two prefixes whose hashes collide send a prompt to
the wrong place, no more; the hash is Python's own of bytes, keyed anew in each process.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transport.frames import Capacity


class PrefixChain:
    """The blocks of one prompt, each named by all tokens up to its end.

    Args:
      token_ids: of the prompt.
      salt: whose cache.
    """

    def __init__(self, token_ids: Iterable[int], salt: bytes) -> None:
        self._packed = array("I", token_ids).tobytes()
        self._salt = salt
        self._names: dict[int, tuple[int, ...]] = {}

    def names(self, block_size: int) -> tuple[int, ...]:
        """Return the names of its full blocks."""
        names = self._names.get(block_size)
        if names is None:
            names = self._names[block_size] = self._chain(4 * block_size)
        return names

    def _chain(self, block_bytes: int) -> tuple[int, ...]:
        names = []
        name = hash(self._salt)
        for end in range(block_bytes, len(self._packed) + 1, block_bytes):
            name = hash((name, self._packed[end - block_bytes : end]))
            names.append(name)
        return tuple(names)


class PrefixIndex:
    """What one life of a worker was given lately."""

    def __init__(self) -> None:
        self._recent: dict[int, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._recent)

    def num_held(self, names: Sequence[int]) -> int:
        """Return how many leading blocks it probably holds."""
        # The beginning of a prompt is forgotten after its end, so what is there comes first.
        return bisect_left(names, True, key=lambda name: name not in self._recent)

    def note(self, names: Sequence[int], num_blocks: int) -> None:
        """Take in that it has these; forget what its pool of `num_blocks` has no room for."""
        for name in reversed(names):
            self._recent.pop(name, None)
            self._recent[name] = None
        while len(self._recent) > num_blocks:
            del self._recent[next(iter(self._recent))]

    def held_tokens(self, chain: PrefixChain | None, capacity: Capacity | None) -> int:
        """Return how many leading tokens of a prompt a worker of that capacity probably holds."""
        if chain is None or capacity is None:
            return 0
        return capacity.block_size * self.num_held(chain.names(capacity.block_size))

    def keep(self, chain: PrefixChain, capacity: Capacity | None) -> None:
        """Note that a worker of that capacity has the KV of a whole prompt."""
        if capacity is not None:
            self.note(chain.names(capacity.block_size), capacity.num_blocks)

    def clear(self) -> None:
        """Forget everything: it is another life."""
        self._recent.clear()
