"""The native backend's model: describe weights and steps in C structures and call the kernels."""

from __future__ import annotations

import math
from ctypes import POINTER, cast
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .adapters import PackedAdapter, adapted_rows
from .packing import WORD_BYTES
from .structs import PARTS, LayerFields, LinearFields, ModelFields, StepFields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from ..adapters.tensors import Adapter
    from ..batch import FlatStep
    from ..kv_pool import KVPool
    from ..model_config import ModelConfig
    from ..rope import RotaryTable
    from .library import Library
    from .pieces import Piece


class PackedModel:
    """A model's C structures, which point to its tensors.

    Args:
      config: the model's shape.
      pieces: packed weights by the names that Packing gives.
      rotary: cosines and sines.
      pool: the KV pool.
      library: packs adapters.
      adapters: adapters that rows may name, by digest.

    Attributes:
      fields: the structure of the model.
      adapters: packed adapters.
    """

    def __init__(
        self,
        config: ModelConfig,
        pieces: Mapping[str, Piece],
        rotary: RotaryTable,
        pool: KVPool,
        library: Library,
        adapters: Mapping[bytes, Adapter],
    ) -> None:
        self._pieces = pieces
        tables = [table.contiguous() for table in rotary.tables]
        self._kept = [pool.blocks, *tables]
        cosines, sines = (table.data_ptr() for table in tables)
        self._layers = (LayerFields * config.num_layers)(
            *(self._layer(f"layers.{index}.") for index in range(config.num_layers))
        )
        per_word = WORD_BYTES // pool.layout.dtype.itemsize
        self.adapters = {
            digest: PackedAdapter(adapter, list(self._layers), library, per_word)
            for digest, adapter in adapters.items()
        }
        self.fields = ModelFields(
            is_bf16=pool.layout.dtype is torch.bfloat16,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=pool.layout.block_size,
            eps=config.rms_norm_eps,
            scale=1.0 / math.sqrt(config.head_dim),
            embedding=self._address("embedding"),
            layers=cast(self._layers, POINTER(LayerFields)),
            norm=self._address("norm"),
            lm_head=self._linear("lm_head"),
            table=self._linear("table" if "table" in pieces else "lm_head"),
            cosines=cosines,
            sines=sines,
            pool=pool.blocks.data_ptr(),
            low_stride=max((one.low_stride for one in self.adapters.values()), default=0),
        )

    def _layer(self, prefix: str) -> LayerFields:
        products = ("qkv", "output", "gate_up", "down")
        norms = ("attention_norm", "query_norm", "key_norm", "mlp_norm")
        return LayerFields(
            **{name: self._linear(prefix + name) for name in products},
            **{name: self._address(prefix + name) for name in norms},
        )

    def _linear(self, name: str) -> LinearFields:
        weight = self._pieces[name]
        return LinearFields(
            self._address(name),
            self._address(f"{name}.strips"),
            self._address(f"{name}.bias"),
            weight.panels,
            weight.steps,
        )

    def _address(self, name: str) -> int | None:
        """Return the address of a piece, or None if the model has no such piece."""
        piece = self._pieces.get(name)
        return None if piece is None else int(piece.data.ctypes.data)


class NativeModel:
    """Computes steps on the CPU.

    Args:
      packed: the model.
      library: the kernels.
      vocab_size: valid entries of a row of logits; the rest is padding.

    Attributes:
      num_threads: threads of the next steps; None for as many as torch uses. Results have the same
        bits for any number.
    """

    def __init__(self, packed: PackedModel, library: Library, vocab_size: int) -> None:
        self._packed = packed
        self._library = library
        self._vocab_size = vocab_size
        self.num_threads: int | None = None
        fields = packed.fields
        self._block_size = fields.block_size
        group = fields.num_heads // fields.num_kv_heads
        self._task_tokens = max(1, library.rows_per_task // group)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._part_s: npt.NDArray[np.float64] | None = None

    def compute(self, step: FlatStep) -> Tensor | None:
        """See engine.runner.StepModel."""
        num_tokens, num_chosen = step.query_start_loc[-1], len(step.sample_rows)
        kept = kept_tokens(step)
        num_threads = self.num_threads or torch.get_num_threads()
        tables, tasks = plan_tasks(step, self._task_tokens)
        arrays = {
            "token_ids": np.array(step.token_ids, dtype=np.int64),
            "positions": np.array(step.positions, dtype=np.int64),
            "slots": np.array(step.slots, dtype=np.int64) @ (self._block_size, 1),
            "tables": tables,
            "tasks": tasks,
            "last_tasks": _kept_tasks(step, kept),
            "sampled": np.array([one.token for one in kept], dtype=np.int64),
            "chosen": np.array([at for at, one in enumerate(kept) if one.is_chosen], np.int64),
        }
        fields = StepFields(num_tokens, len(tasks), int(tasks[:, 2].max()), len(kept))
        fields.num_chosen = num_chosen
        for name, array in arrays.items():
            setattr(fields, name, array.ctypes.data)
        width = self._packed.fields.lm_head.panels * self._library.panel
        logits = torch.empty(num_chosen, width)
        fields.logits = logits.data_ptr()
        states = np.empty((len(kept), self._packed.fields.hidden_size), dtype=np.float32)
        if step.pooled:
            fields.states = states.ctypes.data
        adapted = adapted_rows(self._packed.adapters, step, [one.token for one in kept])
        if adapted is not None:
            fields.adapted, fields.last_adapted = (rows.fields for rows in adapted)
        fields.workspace = self._room(num_tokens, num_threads, fields.adapted.num_rows)
        if self._part_s is not None:
            fields.part_s = self._part_s.ctypes.data
        self._library.compute(self._packed.fields, fields, num_threads)
        _hand_out(step, kept, states)
        return logits[:, : self._vocab_size] if num_chosen else None

    def take_part_s(self) -> dict[str, float]:
        """Return and reset the seconds that each part of steps has taken.

        The first result is empty: timing starts with the first call.
        """
        before, self._part_s = self._part_s, np.zeros(len(PARTS))
        return {} if before is None else dict(zip(PARTS, before.tolist(), strict=True))

    def _room(self, num_tokens: int, num_threads: int, num_adapted: int) -> int:
        """Return the address of a sufficiently large workspace."""
        wanted = self._library.workspace_bytes(
            self._packed.fields, num_tokens, num_threads, num_adapted
        )
        if len(self._workspace) < wanted:
            self._workspace = torch.empty(wanted, dtype=torch.uint8)
        return self._workspace.data_ptr()


def plan_tasks(
    step: FlatStep, task_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Divide a step into attention tasks, longest first so that threads finish together.

    Consecutive decode rows of one sequence form one row, so that its keys are read once.

    Args:
      step: the step.
      task_tokens: most positions per task.

    Returns:
      All block tables concatenated, and [tasks, 4]: start of the task's table, first position,
      number of positions, index of the first token.
    """
    tables: list[int] = []
    tasks = []
    num_rows, first = len(step.seq_lens), 0
    for row, (seq_len, table) in enumerate(zip(step.seq_lens, step.block_tables, strict=True)):
        if row + 1 == num_rows or not step.continues[row + 1]:
            end = step.query_start_loc[row + 1]
            for token in range(first, end, task_tokens):
                count = min(task_tokens, end - token)
                tasks.append((len(tables), seq_len - (end - token), count, token))
            first = end
        tables.extend(table)
    tasks.sort(key=lambda task: -task[1])
    return np.array(tables, dtype=np.int64), np.array(tasks, dtype=np.int64)


class KeptToken(NamedTuple):
    """A token whose logits or hidden state are needed.

    Attributes:
      token: index of the token in the step.
      row: index of its row.
      is_chosen: whether its logits are needed; otherwise its hidden state.
    """

    token: int
    row: int
    is_chosen: bool


def kept_tokens(step: FlatStep) -> list[KeptToken]:
    """Return the tokens that the last layer computes, in step order."""
    kept = [
        KeptToken(token, row, is_chosen=True)
        for row, token in zip(step.sample_rows, step.sample_tokens, strict=False)
    ]
    for row, first, count, _ in step.pooled:
        kept += [KeptToken(first + offset, row, is_chosen=False) for offset in range(count)]
    return sorted(kept) if step.pooled else kept


def _kept_tasks(step: FlatStep, kept: Sequence[KeptToken]) -> npt.NDArray[np.int64]:
    """Return attention tasks for the kept tokens, which come first in the last layer."""
    begins = np.cumsum([0, *(len(table) for table in step.block_tables)])
    tasks = [
        (begins[row], step.seq_lens[row] - (step.query_start_loc[row + 1] - index), 1, at)
        for at, (index, row, _) in enumerate(kept)
    ]
    return np.array(tasks, dtype=np.int64)


def _hand_out(step: FlatStep, kept: Sequence[KeptToken], states: npt.NDArray[np.float32]) -> None:
    """Pass hidden states to the rows that pool them."""
    at = {one.token: place for place, one in enumerate(kept)} if step.pooled else {}
    for _, first, count, pool in step.pooled:
        pool.add(states[at[first] : at[first] + count])
