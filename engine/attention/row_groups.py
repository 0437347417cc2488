"""Group a step's rows by kind (decode, prompt) in the layout that paged attention kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..block_ledger import SCRATCH_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ..batch import FlatStep


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a step that go through one kernel.

    Attributes:
      tokens: int64 [n], indices of their tokens in the step.
      block_table: int32 [rows, W]; cells beyond a sequence hold the scratch block.
      seq_lens: int32 [rows], length of each sequence after the step.
      query_start_loc: int32 [rows + 1], over `tokens`.
      key_start_loc: int32 [rows + 1], running sum of `seq_lens`.
    """

    tokens: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[np.int32]
    key_start_loc: npt.NDArray[np.int32]

    @property
    def max_query_len(self) -> int:
        """Length of the longest row, in tokens."""
        return int(np.diff(self.query_start_loc).max())

    @property
    def max_seq_len(self) -> int:
        """Length of the longest sequence, in tokens."""
        return int(self.seq_lens.max())

    def tiles(self, tile_tokens: int) -> npt.NDArray[np.int32]:
        """Cut the rows into tiles of at most `tile_tokens` tokens.

        Returns:
          [n, 4]: row, index of the tile's first token in the step, that token's position, number of
          tokens. Tiles with most keys come first, so that the last ones to finish are short.
        """
        tiles = []
        for row, (begin, end) in enumerate(
            zip(self.query_start_loc, self.query_start_loc[1:], strict=False)
        ):
            first_position = int(self.seq_lens[row]) - int(end - begin)
            for offset in range(0, int(end - begin), tile_tokens):
                count = min(tile_tokens, int(end - begin) - offset)
                token = int(self.tokens[begin + offset])
                tiles.append((row, token, first_position + offset, count))
        tiles.sort(key=lambda tile: -tile[2])
        return np.array(tiles, dtype=np.int32)


def group_rows(step: FlatStep, is_decode: bool, width: int | None = None) -> RowGroup | None:
    """Lay out a step's decode rows, or its prompt rows; None if there are none.

    Args:
      step: the rows.
      is_decode: whether to take the decode rows or the prompt rows.
      width: width of the block table in blocks; None for that of the longest row.
    """
    rows = [index for index, decodes in enumerate(step.is_decode) if decodes is is_decode]
    if not rows:
        return None
    starts = step.query_start_loc
    lengths = [starts[row + 1] - starts[row] for row in rows]
    seq_lens = [step.seq_lens[row] for row in rows]
    if width is None:
        width = max(len(step.block_tables[row]) for row in rows)
    block_table = np.full((len(rows), width), SCRATCH_BLOCK, dtype=np.int32)
    for index, row in enumerate(rows):
        # A lease may hold more blocks than its sequence can fill. Those are never read.
        held = step.block_tables[row][:width]
        block_table[index, : len(held)] = held
    return RowGroup(
        tokens=np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows]),
        block_table=block_table,
        seq_lens=np.array(seq_lens, dtype=np.int32),
        query_start_loc=_running_sum(lengths),
        key_start_loc=_running_sum(seq_lens),
    )


def _running_sum(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
