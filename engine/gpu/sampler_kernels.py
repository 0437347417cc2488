"""Sample tokens on the device: greedy, temperature and min_p. The host samples all other rows.

As in engine/sampler.py, a random token is the first whose cumulative weight exceeds the number that
(seed, position) determines. That number has the same bits as in engine/philox.py; the last bits of
the weights depend on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


TILE: Final = 4096
"""Logits per program: a vocabulary of 128k tokens takes 32 programs a row."""


@triton.jit
def philox_uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return engine.philox.uniform(seed, position), fp64."""
    c0 = position.to(tl.uint64)
    c1 = tl.zeros_like(c0)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = seed.to(tl.uint64)
    k1 = tl.zeros_like(c0)
    first_multiplier = tl.full(c0.shape, 0xD2E7470EE14C6C93, tl.uint64)
    second_multiplier = tl.full(c0.shape, 0xCA5A826395121157, tl.uint64)
    first_step = tl.full(c0.shape, 0x9E3779B97F4A7C15, tl.uint64)
    second_step = tl.full(c0.shape, 0xBB67AE8584CAA73B, tl.uint64)
    for _ in tl.static_range(10):
        first_high = tl.umulhi(c0, first_multiplier)
        first_low = c0 * first_multiplier
        second_high = tl.umulhi(c2, second_multiplier)
        second_low = c2 * second_multiplier
        c0 = second_high ^ c1 ^ k0
        c1 = second_low
        c2 = first_high ^ c3 ^ k1
        c3 = first_low
        k0 = k0 + first_step
        k1 = k1 + second_step
    return (c0 >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


# The number of rows changes from step to step: compile one kernel for all.
@triton.jit(do_not_specialize=["count"])
def uniform_kernel(
    seeds: tl.tensor, positions: tl.tensor, numbers: tl.tensor, count: int, block: tl.constexpr
) -> None:
    """Draw each row's random number. Grid: blocks of rows."""
    rows = tl.program_id(0) * block + tl.arange(0, block)
    inside = rows < count
    seed = tl.load(seeds + rows, mask=inside, other=0)
    position = tl.load(positions + rows, mask=inside, other=0)
    tl.store(numbers + rows, philox_uniform(seed, position), mask=inside)


@triton.jit
def best_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    best: tl.tensor,
    vocab_size: int,
    num_tiles: int,
    tile: tl.constexpr,
) -> None:
    """Find a tile's largest logit and its index, the first of equals. Grid: rows, tiles."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    values = tl.load(
        logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf")
    )
    place = row * num_tiles + tl.program_id(1)
    tl.store(maxima + place, tl.max(values, 0))
    tl.store(best + place, tl.program_id(1) * tile + tl.argmax(values, 0))


@triton.jit
def mass_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    masses: tl.tensor,
    vocab_size: int,
    num_tiles: int,
    tile: tl.constexpr,
    padded_tiles: tl.constexpr,
) -> None:
    """Add up a tile's weights. Grid: rows, tiles."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature > 0.0:
        tiles = tl.arange(0, padded_tiles)
        of_tiles = tl.load(
            maxima + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")
        )
        columns = tl.program_id(1) * tile + tl.arange(0, tile)
        values = tl.load(
            logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf")
        )
        weights = tl.exp((values - tl.max(of_tiles, 0)) / temperature)
        weights = tl.where(weights >= tl.load(min_ps + row).to(tl.float32), weights, 0.0)
        mass = tl.sum(weights.to(tl.float64), 0)
        tl.store(masses + row * num_tiles + tl.program_id(1), mass)


@triton.jit
def pick_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    best: tl.tensor,
    masses: tl.tensor,
    numbers: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    chosen: tl.tensor,
    vocab_size: int,
    num_tiles: int,
    tile: tl.constexpr,
    padded_tiles: tl.constexpr,
) -> None:
    """Choose each row's token. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    tiles = tl.arange(0, padded_tiles)
    is_tile = tiles < num_tiles
    of_tiles = tl.load(maxima + row * num_tiles + tiles, mask=is_tile, other=float("-inf"))
    token = tl.load(best + row * num_tiles + tl.argmax(of_tiles, 0)).to(tl.int64)
    if temperature > 0.0:
        mass = tl.load(masses + row * num_tiles + tiles, mask=is_tile, other=0.0)
        cumulative = tl.cumsum(mass, 0)
        total = tl.max(cumulative, 0)
        target = tl.load(numbers + row) * total
        # What is not above the target lies before it; what reaches the total is the last with mass.
        before = tl.sum((cumulative <= target).to(tl.int32), 0)
        last = tl.sum((cumulative < total).to(tl.int32), 0)
        place = tl.minimum(tl.minimum(before, last), num_tiles - 1)
        passed = tl.max(tl.where(tiles < place, cumulative, 0.0), 0)
        columns = place * tile + tl.arange(0, tile)
        values = tl.load(
            logits + row * vocab_size + columns, mask=columns < vocab_size, other=float("-inf")
        )
        weights = tl.exp((values - tl.max(of_tiles, 0)) / temperature)
        weights = tl.where(weights >= tl.load(min_ps + row).to(tl.float32), weights, 0.0)
        reached = passed + tl.cumsum(weights.to(tl.float64), 0)
        count = tl.sum((reached <= target).to(tl.int32), 0)
        last_weight = tl.max(tl.where(weights > 0.0, tl.arange(0, tile), 0), 0)
        token = (place * tile + tl.minimum(count, last_weight)).to(tl.int64)
    # A row of NaN has no weights anywhere: whatever comes of it is still a token.
    tl.store(chosen + row, tl.minimum(token, vocab_size - 1))


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return engine.philox.uniform of each pair: int64 [n], int64 [n] -> fp64 [n]."""
    numbers = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    grid = (triton.cdiv(len(seeds), 64),)
    uniform_kernel[grid](seeds, positions, numbers, len(seeds), 64)
    return numbers


def choose(
    logits: Tensor, temperatures: Tensor, min_ps: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Choose one token per row, as engine.sampler does for plain rows.

    Args:
      logits: fp32 [n, vocab_size], contiguous.
      temperatures: fp64 [n]; 0 is greedy.
      min_ps: fp64 [n].
      seeds: int64 [n].
      positions: int64 [n], positions in the completion.

    Returns:
      int64 [n].
    """
    rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    padded_tiles = triton.next_power_of_2(num_tiles)
    maxima = logits.new_empty(rows, num_tiles)
    best = torch.empty(rows, num_tiles, dtype=torch.int32, device=logits.device)
    masses = torch.empty(rows, num_tiles, dtype=torch.float64, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    numbers = uniforms(seeds, positions)
    grid = (rows, num_tiles)
    best_kernel[grid](logits, maxima, best, vocab_size, num_tiles, TILE)
    mass_kernel[grid](
        logits, maxima, temperatures, min_ps, masses, vocab_size, num_tiles, TILE, padded_tiles
    )
    pick_kernel[(rows,)](
        logits,
        maxima,
        best,
        masses,
        numbers,
        temperatures,
        min_ps,
        chosen,
        vocab_size,
        num_tiles,
        TILE,
        padded_tiles,
    )
    return chosen
