"""What a step computes and what comes of it, in plain integers.

Knows rows, positions and block tables and lays them out flat; knows no tensors and no model, so
that the workers' schedulers can be tested without either.
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
"""Steps are padded to a multiple of this, so that a token never depends on the other rows of the
step. Kernels take rows four at a time and whatever is left over in another order of summation. With
one thread that only shows below 4 rows; with several the rows are dealt out, and some thread may
get a rest: in fp32 2 and 8 threads gave other bits for 5-7 and 9-11 rows, 16 threads for 17-19 and
25-27 too. Multiples of 4 agreed with one another everywhere; bf16 agreed for any number."""
MAX_UNDER_WAY: Final = 2
"""Steps that may be launched and not read: one that the device computes, one that waits for it."""


class Mask(NamedTuple):
    """Which tokens may come next.

    Attributes:
      allowed: [vocab_size], of tokens that have text.
      may_end: whether the completion may end here.
    """

    allowed: NDArray[bool_]
    may_end: bool


class AllBut(NamedTuple):
    """Any token may come next but these: no mask of the whole vocabulary for a few.

    Attributes:
      token_ids: of the vocabulary.
    """

    token_ids: tuple[int, ...]


class Barred(Enum):
    """Why there is no mask, and so no token."""

    STUCK = auto()  # nothing may follow
    TOO_COSTLY = auto()  # what may follow costs too much to know
    LATE = auto()  # it is not known yet: the row computes its token again


PendingMask: TypeAlias = "Future[Mask | Barred] | Future[Mask | AllBut | None]"
"""What may come next, or is on its way; None for any token."""


class Constraint(Protocol):
    """What one sequence's completion has to be."""

    @property
    def is_slow(self) -> bool:
        """Whether its masks take so long that other rows should not wait for them."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether a slow mask is not there yet, so that a row would be computed for nothing. Not to
        be asked while a step runs."""
        ...

    def begin(self, output_ids: Sequence[int]) -> PendingMask:
        """Begin to find out what may follow the completion so far. Asked again for the same tokens
        it goes on with what it has begun."""
        ...

    def late(self) -> Barred:
        """Return what becomes of a row without a mask in time."""
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to choose the token that follows a row.

    Attributes:
      params: the request's parameters.
      position: which completion token it will be, from 0; with the seed it keys the randomness.
      prompt_ids: for the repetition penalty.
      output_ids: the `position` completion tokens so far, for the penalties.
      eos_token_ids: the model's own end tokens, not chosen before `min_tokens`.
      constraint: what the completion has to be, None for anything.
    """

    params: SamplingParams
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    eos_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None


def is_plain(params: SamplingParams, position: int) -> bool:
    """Return whether a token is chosen from its logits, temperature and `min_p` alone.

    Such a choice needs neither the tokens before it nor the host.

    Args:
      params: the request's parameters.
      position: which completion token it will be.
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
    """Tokens and a few more behind them, without a copy of the former.

    Args:
      tokens: not to be changed meanwhile.
      more: what follows.
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

    A sequence may have several decode rows, each one token behind the one before it, with the same
    table: KV of all rows is stored before any of them attends. So is a guess computed beside the
    token that it follows, and with the bits that it would have alone.

    Attributes:
      token_ids: tokens to compute, at least one; their KV is stored.
      start: position of the first; the KV of all before it is in the blocks already.
      block_table: the sequence's blocks, enough for `start + len(token_ids)` tokens.
      sample: how to choose the token after the last one, or None to compute KV only.
      is_decode: whether it is one token of a completion. A row's bits depend on how it is computed,
        so a prompt's token is prefill also where the borders of chunks leave it alone.
      follows: index of the row, in the step that was launched just before, that chooses this row's
        token; `token_ids` then holds a placeholder, for that step may still be under way.
      pool: takes hidden states, of a row whose input becomes a vector; such a row samples nothing.
      adapter: digest of the adapter that computes it, with all else of its sequence; empty for the
        base alone.
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
      token_id: its id.
      logprob: natural logarithm before temperature and penalties, None if not asked for.
      top: (token id, logprob) of the best, best first, as many as asked for.
      barred: why no token could be chosen, because of the constraint; the others mean nothing then.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    barred: Barred | None = None


class PooledRow(NamedTuple):
    """Tokens of one row whose hidden states are wanted.

    Attributes:
      row: index of the row.
      first: index of the first token in `token_ids`.
      num_tokens: how many; at least one.
      pool: takes them.
    """

    row: int
    first: int
    num_tokens: int
    pool: Pool


@dataclass(frozen=True, slots=True)
class FlatStep:
    """The rows of a step end to end, as the model's one forward takes them.

    Attributes:
      token_ids: all rows' tokens, then padding.
      positions: of each token in its sequence.
      slots: (block, offset) of each token's KV; padding has none and comes last.
      query_start_loc: where each row begins in `token_ids`, and where the last one ends.
      seq_lens: tokens of each row's sequence after this step.
      block_tables: of each row, cut to the blocks that `seq_lens` fills.
      is_decode: of each row, whether it is one token of a completion.
      continues: of each row, whether it is a decode row right behind the row before it, in the same
        sequence.
      sample_rows: indices into the rows that choose a token.
      sample_tokens: index in `token_ids` of the last token of each such row, padded.
      pooled: rows of which hidden states are wanted.
      adapters: of each row the digest of its adapter, empty for the base alone.
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
    """Lay rows out for one forward.

    Args:
      rows: at least one.
      block_size: tokens per block.
    """
    step = FlatStep([], [], [], [0], [], [], [], [], [], [])
    before: StepRow | None = None
    for index, row in enumerate(rows):
        end = row.start + len(row.token_ids)
        num_blocks = -(-end // block_size)
        assert row.token_ids, "a row without tokens"
        assert num_blocks <= len(row.block_table), "a row that is longer than its blocks"
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
    """Refuse what would break a step for everybody in it. To be called when a request arrives.

    Raises:
      RequestError: 400; a token id of the prompt or of logit_bias is not in the vocabulary.
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
