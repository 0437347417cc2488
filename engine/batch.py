"""The input and output types of a step (rows, samples), and their flat layout for the forward pass.

Plain integers without tensors or a model, so that the workers' schedulers can be tested alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, overload

from triolet.errors import invalid_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from numpy import bool_
    from numpy.typing import NDArray

    from triolet.sampling import SamplingParams

    from .pooling import Pool

STEP_TOKENS_MULTIPLE: Final = 4
"""Steps are padded to a multiple of this, so that a token's bits never depend on the other rows of
the step. Kernels compute rows four at a time and the remainder in another order of summation. With
one thread this shows below 4 rows only. With several, rows are divided and some thread may get a
remainder: in fp32, 2 and 8 threads gave other bits for 5-7 and 9-11 rows, 16 threads for 17-19 and
25-27 too. Multiples of 4 agreed everywhere; bf16 agreed for any number."""
MAX_UNDER_WAY: Final = 2
"""Steps that may be launched before a result is read: one computing, one waiting behind it."""


class Mask(NamedTuple):
    """Which tokens may come next.

    Attributes:
      allowed: [vocab_size], which tokens with text are allowed.
      may_end: whether the completion may end here.
    """

    allowed: NDArray[bool_]
    may_end: bool


class AllBut(NamedTuple):
    """Any token may come next except these. Saves a mask of the whole vocabulary.

    Attributes:
      token_ids: the forbidden tokens.
    """

    token_ids: tuple[int, ...]


class Barred(Enum):
    """Why a row has no token."""

    STUCK = auto()  # no token may follow
    TOO_COSTLY = auto()  # the mask takes too long to compute
    LATE = auto()  # the mask is not ready: the row computes its token again
    NOT_FINITE = auto()  # the model computed NaN or infinity: weights or device are damaged


PendingMask: TypeAlias = "Future[Mask | Barred] | Future[Mask | AllBut | None]"
"""A mask, possibly still being computed; None allows any token."""


class Constraint(Protocol):
    """Restricts the tokens of one sequence's completion."""

    @property
    def is_slow(self) -> bool:
        """Whether masks take so long that other rows should not wait for them."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a slow mask is not ready yet, so that computing the row now would be wasted. Must
        not be read while a step runs."""
        ...

    def begin(self, output_ids: Sequence[int]) -> PendingMask:
        """Start computing the mask that follows the completion so far. A second call for the same
        tokens continues the first computation."""
        ...

    def late(self) -> Barred:
        """Return the outcome of a row without a mask in time."""
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to choose the token that follows a row.

    Attributes:
      params: the request's sampling parameters.
      position: index of the completion token, from 0; seed and position determine the randomness.
      prompt_ids: the prompt, for the repetition penalty.
      output_ids: the `position` completion tokens so far, for the penalties.
      eos_token_ids: the model's end tokens, not chosen before `min_tokens`.
      constraint: restricts the completion; None allows any token.
    """

    params: SamplingParams
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    eos_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None


def is_plain(params: SamplingParams, position: int) -> bool:
    """Return whether a token depends on its logits, temperature and `min_p` only.

    Such a token can be sampled on the device, without the host and the tokens before it.

    Args:
      params: the request's sampling parameters.
      position: index of the completion token.
    """
    return (
        params.logprobs is None
        and not params.is_constrained
        and not params.has_penalties
        and not params.logit_bias
        and position >= params.min_tokens
        and params.top_k == 0
        and params.top_p >= 1.0
    )


class FollowedBy(Sequence[int]):
    """A view of tokens followed by a few more, without copying the first.

    Args:
      tokens: the first tokens; must not change while this object is used.
      more: the tokens that follow.
    """

    __slots__ = ("_more", "_tokens")

    def __init__(self, tokens: Sequence[int], more: Sequence[int]) -> None:
        self._tokens = tokens
        self._more = more

    def __len__(self) -> int:
        return len(self._tokens) + len(self._more)

    def __iter__(self) -> Iterator[int]:
        return chain(self._tokens, self._more)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[index]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's part in a step: one token in decode, a chunk of the prompt in prefill.

    A sequence may have several consecutive decode rows with the same block table. The KV of all
    rows is stored before any of them attends, so speculated tokens are computed in one step, with
    the same bits as one by one.

    Attributes:
      token_ids: tokens to compute, at least one; their KV is stored.
      start: position of the first token. The KV of all earlier positions is already in the blocks.
      block_table: the sequence's blocks, enough for `start + len(token_ids)` tokens.
      sample: how to choose the token after the last one, or None to compute KV only.
      is_decode: whether the row is one token of a completion. A row's bits depend on its kind, so a
        prompt's token is prefill even when it is alone in its chunk.
      follows: index of the row in the previous step that samples this row's token; `token_ids` then
        holds a placeholder, because that step may still be running.
      pool: receives hidden states if the input becomes an embedding vector; such a row samples
        nothing.
      adapter: digest of the sequence's adapter; empty for the base model.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None = None
    is_decode: bool = False
    follows: int | None = None
    pool: Pool | None = None
    adapter: bytes = b""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token.

    Attributes:
      token_id: the token's id.
      logprob: natural logarithm before temperature and penalties; None if not requested.
      top: (token id, logprob) of the requested number of best tokens, best first.
      barred: why there is no token; the other fields are meaningless then.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    barred: Barred | None = None


class PooledRow(NamedTuple):
    """Tokens of one row with hidden states to pool.

    Attributes:
      row: index of the row.
      first: index of the first token in `token_ids`.
      num_tokens: number of tokens, at least one.
      pool: receives the hidden states.
    """

    row: int
    first: int
    num_tokens: int
    pool: Pool


@dataclass(frozen=True, slots=True)
class FlatStep:
    """The rows of a step concatenated, as input of one forward pass.

    Attributes:
      token_ids: all rows' tokens, then padding.
      positions: each token's position in its sequence.
      slots: (block, offset) of each token's KV; none for padding.
      query_start_loc: where each row begins in `token_ids`, and where the last one ends.
      seq_lens: length of each row's sequence after this step.
      block_tables: each row's blocks, cut to those that `seq_lens` fills.
      is_decode: for each row, whether it is one token of a completion.
      continues: for each row, whether it is a decode row that continues the previous row's
        sequence.
      sample_rows: indices of the rows that sample a token.
      sample_tokens: index in `token_ids` of the last token of each such row, padded.
      pooled: rows with hidden states to pool.
      adapters: each row's adapter digest; empty for the base model.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[tuple[int, int]]
    query_start_loc: list[int]
    seq_lens: list[int]
    block_tables: list[Sequence[int]]
    is_decode: list[bool]
    continues: list[bool]
    sample_rows: list[int]
    sample_tokens: list[int]
    pooled: list[PooledRow] = field(default_factory=list)
    adapters: list[bytes] = field(default_factory=list)


def flatten(rows: Sequence[StepRow], block_size: int) -> FlatStep:
    """Lay rows out for one forward pass.

    Args:
      rows: one or more rows.
      block_size: tokens per block.
    """
    step = FlatStep([], [], [], [0], [], [], [], [], [], [])
    before: StepRow | None = None
    for index, row in enumerate(rows):
        end = row.start + len(row.token_ids)
        num_blocks = -(-end // block_size)
        assert row.token_ids, "a row has no tokens"
        assert num_blocks <= len(row.block_table), "a row needs more blocks than it has"
        assert not row.is_decode or len(row.token_ids) == 1, "decode goes token by token"
        step.token_ids.extend(row.token_ids)
        step.positions.extend(range(row.start, end))
        step.slots.extend(
            (row.block_table[position // block_size], position % block_size)
            for position in range(row.start, end)
        )
        step.query_start_loc.append(len(step.token_ids))
        step.seq_lens.append(end)
        step.block_tables.append(row.block_table[:num_blocks])
        step.is_decode.append(row.is_decode)
        step.adapters.append(row.adapter)
        step.continues.append(before is not None and _continues(row, before))
        before = row
        if row.sample is not None:
            step.sample_rows.append(index)
            step.sample_tokens.append(len(step.token_ids) - 1)
        elif row.pool is not None and (wanted := row.pool.wanted(row.start, end)):
            first = len(step.token_ids) - (end - wanted.start)
            step.pooled.append(PooledRow(index, first, len(wanted), row.pool))
    _pad(step.token_ids)
    _pad(step.positions)
    if step.sample_tokens:
        _pad(step.sample_tokens)
    return step


def _continues(row: StepRow, before: StepRow) -> bool:
    return (
        row.is_decode
        and before.is_decode
        and row.block_table is before.block_table
        and row.start == before.start + 1
    )


def check_request(vocab_size: int, token_ids: Sequence[int], params: SamplingParams) -> None:
    """Check a request when it arrives: a bad token id would fail the step for every row in it.

    Raises:
      RequestError: 400, a token id of the prompt or of logit_bias is not in the vocabulary.
    """
    if not token_ids:
        raise invalid_request("the prompt has no tokens", "prompt")
    for token_id in (max(token_ids), min(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise invalid_request(
                f"token ids of the prompt must lie in 0…{vocab_size - 1}; found {token_id}",
                "prompt",
            )
    reasoning = params.reasoning
    if reasoning is not None and max(reasoning.token_ids) >= vocab_size:
        raise invalid_request(
            f"the markers of reasoning name token {max(reasoning.token_ids)}; ids lie in "
            f"0…{vocab_size - 1}; set server.reasoning_parser=none"
        )
    for token_id, _ in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise invalid_request(
                f"logit_bias names token {token_id}; ids lie in 0…{vocab_size - 1}", "logit_bias"
            )


def _pad(values: list[int]) -> None:
    values.extend([0] * (-len(values) % STEP_TOKENS_MULTIPLE))
