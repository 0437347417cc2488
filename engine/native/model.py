"""A model whose steps the kernels compute.

Knows how a model and a step are laid out for them; knows no kernel's inside, no sampling and no
leases.
"""

from __future__ import annotations

import math
from ctypes import POINTER, cast
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .packing import pack, pack_bias
from .structs import PARTS, LayerFields, LinearFields, ModelFields, StepFields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from ..batch import FlatStep
    from ..kv_pool import KVPool
    from ..layers import DecoderLayer, Linear, RMSNorm
    from ..model_config import ModelConfig
    from ..rope import RotaryTable
    from ..weights import WeightReader
    from .library import Library


class PackedModel:
    """All tensors of a model as the kernels want them, and the structures that point to them.

    Layers are packed one by one, so that hardly more than one is in memory twice.

    Args:
      config: the model's shape.
      reader: reads the tensors.
      rotary: cosines and sines.
      pool: where KV lies.
      library: packs.
      is_int8: round weights to int8, those of norms and biases excepted.
      on_progress: told the share of layers that are packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        rotary: RotaryTable,
        pool: KVPool,
        library: Library,
        is_int8: bool,
        on_progress: Callable[[float], None],
    ) -> None:
        self._library = library
        self._is_int8 = is_int8
        self._kept: list[Tensor] = [pool.blocks]
        fields = ModelFields(
            is_bf16=pool.layout.dtype is torch.bfloat16,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=pool.layout.block_size,
            eps=config.rms_norm_eps,
            scale=1.0 / math.sqrt(config.head_dim),
            norm=self._norm(reader.norm()),
            pool=pool.blocks.data_ptr(),
        )
        self._vocabulary(config, reader, fields)
        fields.cosines, fields.sines = (self._address(table) for table in rotary.tables)
        self._layers = (LayerFields * config.num_layers)()
        for index in range(config.num_layers):
            self._layers[index] = self._layer(reader.layer(index))
            on_progress((index + 1) / config.num_layers)
        fields.layers = cast(self._layers, POINTER(LayerFields))
        reader.finish()
        self.fields = fields

    def _vocabulary(self, config: ModelConfig, reader: WeightReader, to: ModelFields) -> None:
        """Fill in the embedding and the output layer. A tied model has one table: the kernels take
        a token's row out of the packed one."""
        embedding = reader.embedding()
        to.lm_head = self._linear(reader.lm_head(embedding))
        to.embedding = None if config.is_tied else self._address(embedding)

    def _layer(self, layer: DecoderLayer) -> LayerFields:
        query_norm, key_norm = layer.query_norm, layer.key_norm
        gate_up = self._linear(layer.gate_up, is_gate_up=True)
        return LayerFields(
            qkv=self._linear(layer.qkv),
            output=self._linear(layer.output),
            gate_up=gate_up,
            down=self._linear(layer.down, inputs=gate_up.panels * self._library.panel // 2),
            attention_norm=self._norm(layer.attention_norm),
            query_norm=None if query_norm is None else self._norm(query_norm),
            key_norm=None if key_norm is None else self._norm(key_norm),
            mlp_norm=self._norm(layer.mlp_norm),
        )

    def _linear(self, layer: Linear, is_gate_up: bool = False, inputs: int = 0) -> LinearFields:
        library = self._library
        packed = pack(
            library, layer.weight, is_int8=self._is_int8, is_gate_up=is_gate_up, inputs=inputs
        )
        bias = scales = None
        if layer.bias is not None:
            bias = self._address(pack_bias(layer.bias, library.panel, is_gate_up=is_gate_up))
        if packed.scales is not None:
            scales = self._address(packed.scales)
        address = self._address(packed.weight)
        return LinearFields(address, scales, bias, packed.panels, packed.steps)

    def _norm(self, norm: RMSNorm) -> int:
        return self._address(norm.weight.float())

    def _address(self, tensor: Tensor) -> int:
        """Return where a tensor lies, and keep it there."""
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


class NativeModel:
    """Computes steps on the CPU.

    Args:
      packed: the model.
      library: the kernels.
      vocab_size: entries of a row of logits that mean something.

    Attributes:
      num_threads: that the next steps compute with; None for as many as torch. The bits are the
        same with any number.
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
        fields.workspace = self._room(num_tokens, num_threads)
        if self._part_s is not None:
            fields.part_s = self._part_s.ctypes.data
        self._library.compute(self._packed.fields, fields, num_threads)
        _hand_out(step, kept, states)
        return logits[:, : self._vocab_size] if num_chosen else None

    def take_part_s(self) -> dict[str, float]:
        """Return the seconds that each part of steps has taken since this was last asked.

        The first answer is empty: before the first call no clock is read.
        """
        before, self._part_s = self._part_s, np.zeros(len(PARTS))
        return {} if before is None else dict(zip(PARTS, before.tolist(), strict=True))

    def _room(self, num_tokens: int, num_threads: int) -> int:
        """Return the address of a workspace that is large enough."""
        wanted = self._library.workspace_bytes(self._packed.fields, num_tokens, num_threads)
        if len(self._workspace) < wanted:
            self._workspace = torch.empty(wanted, dtype=torch.uint8)
        return self._workspace.data_ptr()


def plan_tasks(
    step: FlatStep, task_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Part a step into attention's tasks, the longest first so that threads end together.

    Decode rows that continue one another are one row here: the keys are read once for all of them.

    Args:
      step: the rows.
      task_tokens: most positions per task.

    Returns:
      All block tables end to end, and [tasks, 4]: where a task's table begins there, its first
      position, how many positions, index of its first token.
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
    """A token that leaves more behind than its KV.

    Attributes:
      token: its index in the step.
      row: of the batch.
      is_chosen: its logits are wanted; otherwise its hidden state.
    """

    token: int
    row: int
    is_chosen: bool


def kept_tokens(step: FlatStep) -> list[KeptToken]:
    """Return the tokens that the last layer computes, in their order in the step."""
    kept = [
        KeptToken(token, row, is_chosen=True)
        for row, token in zip(step.sample_rows, step.sample_tokens, strict=False)
    ]
    for row, first, count, _ in step.pooled:
        kept += [KeptToken(first + offset, row, is_chosen=False) for offset in range(count)]
    return sorted(kept) if step.pooled else kept


def _kept_tasks(step: FlatStep, kept: Sequence[KeptToken]) -> npt.NDArray[np.int64]:
    """Return tasks for the kept tokens alone, which then are the step's first tokens."""
    begins = np.cumsum([0, *(len(table) for table in step.block_tables)])
    tasks = [
        (begins[row], step.seq_lens[row] - (step.query_start_loc[row + 1] - index), 1, at)
        for at, (index, row, _) in enumerate(kept)
    ]
    return np.array(tasks, dtype=np.int64)


def _hand_out(step: FlatStep, kept: Sequence[KeptToken], states: npt.NDArray[np.float32]) -> None:
    """Give hidden states to the rows that want some."""
    at = {one.token: place for place, one in enumerate(kept)} if step.pooled else {}
    for _, first, count, pool in step.pooled:
        pool.add(states[at[first] : at[first] + count])
