"""Counter-based random numbers for sampling: a pure function of (seed, position), without state.

A sequence that continues in another process draws the same numbers at the same positions. Source:
Philox4x64-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC '11).
"""

from __future__ import annotations

from typing import Final

_WORD: Final = 2**64 - 1
_MULTIPLIERS: Final = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS: Final = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS: Final = 10


def philox4x64(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return four random 64-bit words for a 256-bit counter and a 128-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 64) ^ c1 ^ k0,
            second & _WORD,
            (first >> 64) ^ c3 ^ k1,
            first & _WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that determines the token at a position."""
    word = philox4x64((position, 0, 0, 0), (seed & _WORD, 0))[0]
    return (word >> 11) * 2.0**-53
