"""Assign decode rows to places on the device, and list what to upload for each step.

Plain integers and numpy. The device keeps block tables and the tokens that it sampled last. A row
that continues keeps its place, so only new blocks of its table are uploaded, and not its token.
Lengths, seeds and sampling parameters are uploaded in every step in one small copy.

A place without a row is padding: length 1, in the scratch block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ..block_ledger import SCRATCH_BLOCK
from .buckets import bucket_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ..batch import StepRow

SOURCE, TOKEN, LENGTH, SEED, POSITION, TEMPERATURE, MIN_P = range(7)
"""Rows of the array that is uploaded in each step: place whose last sampled token is this place's
input, or -1; the input token if -1; length of the sequence after the step; seed; position in the
completion; temperature and min_p as fp64 bits."""
NUM_FIELDS: Final = 7
NO_SOURCE: Final = -1


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One step.

    Attributes:
      size: places that are computed.
      places: place of each row.
      fields: int64 [NUM_FIELDS, size].
      patches: int64 [3, n]: place, column and block of every cell of the tables that is new.
    """

    size: int
    places: list[int]
    fields: npt.NDArray[np.int64]
    patches: npt.NDArray[np.int64]


class DecodeRows:
    """Gives rows their places, and remembers what the device's tables hold.

    Args:
      sizes: the buckets.
      block_size: tokens per block.
    """

    def __init__(self, sizes: Sequence[int], block_size: int) -> None:
        self._sizes = sizes
        self._block_size = block_size
        self._tables: list[list[int]] = [[] for _ in range(sizes[-1])]
        self._places: list[int] = []

    def forget_places(self) -> None:
        """Record that the next step follows one that was not arranged here."""
        self._places = []

    def forget_tables(self) -> None:
        """Record that the last upload may have failed, so that the next one sends everything."""
        self._tables = [[] for _ in self._tables]
        self._places = []

    def arrange(self, rows: Sequence[StepRow]) -> Arrangement:
        """Assign places to the rows of a step.

        Args:
          rows: decode rows, at most the largest bucket. `follows` names a row of the step that was
            arranged last.
        """
        size = bucket_for(len(rows), self._sizes)
        places = self._place(rows, size)
        fields = np.zeros((NUM_FIELDS, size), dtype=np.int64)
        fields[SOURCE] = NO_SOURCE
        fields[LENGTH] = 1
        temperatures = np.zeros(size)
        min_ps = np.zeros(size)
        for row, place in zip(rows, places, strict=True):
            fields[LENGTH, place] = row.start + 1
            if row.follows is None:
                fields[TOKEN, place] = row.token_ids[0]
            else:
                fields[SOURCE, place] = self._places[row.follows]
            if row.sample is not None:
                params = row.sample.params
                fields[SEED, place] = params.seed
                fields[POSITION, place] = row.sample.position
                temperatures[place] = params.temperature
                min_ps[place] = params.min_p
        fields[TEMPERATURE] = temperatures.view(np.int64)
        fields[MIN_P] = min_ps.view(np.int64)
        patches = self._patch(rows, places, size)
        self._places = places
        return Arrangement(size, places, fields, patches)

    def _place(self, rows: Sequence[StepRow], size: int) -> list[int]:
        """Keep continuing rows in place, and put others into the lowest free places."""
        places = [-1] * len(rows)
        taken = set()
        for index, row in enumerate(rows):
            if row.follows is not None and (place := self._places[row.follows]) < size:
                assert place not in taken, "two rows follow the same row"
                places[index] = place
                taken.add(place)
        free = iter(place for place in range(size) if place not in taken)
        return [place if place >= 0 else next(free) for place in places]

    def _patch(
        self, rows: Sequence[StepRow], places: Sequence[int], size: int
    ) -> npt.NDArray[np.int64]:
        wanted: dict[int, Sequence[int]] = {}
        for row, place in zip(rows, places, strict=True):
            num_blocks = -(-(row.start + 1) // self._block_size)
            assert num_blocks <= len(row.block_table), "a row needs more blocks than it has"
            wanted[place] = row.block_table[:num_blocks]
        patches = []
        for place in range(size):
            held = self._tables[place]
            # Padding writes into the first block of its place, which must not be leased.
            table = list(wanted.get(place, (SCRATCH_BLOCK,)))
            patches += [
                (place, column, block)
                for column, block in enumerate(table)
                if column >= len(held) or held[column] != block
            ]
            self._tables[place] = table
        return np.array(patches, dtype=np.int64).reshape(-1, 3).T
