"""Sample tokens from logits: a pure function of (seed, position, logits, tokens so far).

A random token is the first whose cumulative probability exceeds one uniform number that
(seed, position) determines (engine/philox.py). A row's result is the same in every batch.

Order, as in Hugging Face: repetition penalty, presence and frequency penalty, logit bias, no end
token before `min_tokens`, the constraint's mask; then, unless greedy: temperature, top-k, top-p,
min-p. Reported logprobs are those of the model's distribution, before all of this. Greedy rows
without other options cost one argmax. Masks depend on the tokens so far only, so they are computed
while the device computes the logits.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import TimeoutError as NotInTime
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import torch

from triolet.sampling import end_token_ids

from .batch import AllBut, Barred, Mask, Sampled
from .philox import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from triolet.sampling import SamplingParams

    from .batch import Constraint, PendingMask, SampleSpec

Choice: TypeAlias = Mask | AllBut | None
"""The allowed tokens; None allows any."""
UNHURRIED_S: Final = 10.0
"""Default wait for masks."""
TOP_P_CANDIDATES: Final = 1024
"""The nucleus is searched among this many best tokens first, then among more: sorting a vocabulary
of 128k tokens takes 10 ms a row, and few nuclei are larger than this."""


def begin_masks(specs: Sequence[SampleSpec]) -> dict[int, PendingMask]:
    """Start computing the masks of all rows that have a constraint, by row index."""
    return {
        index: spec.constraint.begin(spec.output_ids)
        for index, spec in enumerate(specs)
        if spec.constraint is not None
    }


def sample(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    masks: dict[int, PendingMask] | None = None,
    wait_s: float = UNHURRIED_S,
    slow_wait_s: float = UNHURRIED_S,
) -> list[Sampled]:
    """Sample one token per row.

    Args:
      logits: fp32 [at least len(specs), vocab_size]; rows beyond the specs are padding. Changed in
        place.
      specs: sampling options of each row.
      masks: the result of `begin_masks`, if it was called already.
      wait_s: longest wait for the masks of all rows together.
      slow_wait_s: longest wait for rows with slow masks.
    """
    if masks is None:
        masks = begin_masks(specs)
    reports = {
        index: torch.log_softmax(logits[index], dim=-1)
        for index, spec in enumerate(specs)
        if spec.params.logprobs is not None
    }
    barred: dict[int, Barred] = {}
    now = time.monotonic()
    for index, spec in enumerate(specs):
        mask = None
        if index in masks and spec.constraint is not None:
            most_s = slow_wait_s if spec.constraint.is_slow else wait_s
            mask = _mask_of(spec.constraint, masks[index], now + most_s)
        if isinstance(mask, Barred):
            barred[index] = mask
        else:
            _adjust(logits[index], spec, mask)
    rows = logits[: len(specs)]
    token_ids, best = _best_of(rows)
    if not np.isfinite(best).all():
        for index in np.flatnonzero(~np.isfinite(best)).tolist():
            # A mask may have left nothing, which says nothing about what the model computed.
            is_stuck = index in masks and best[index] < 0
            barred.setdefault(index, Barred.STUCK if is_stuck else Barred.NOT_FINITE)
    for index, spec in enumerate(specs):
        if spec.params.temperature > 0 and index not in barred:
            number = uniform(spec.params.seed, spec.position)
            token_ids[index] = _draw(logits[index], token_ids[index], spec.params, number)
    return [
        Sampled(0, barred=barred[index])
        if index in barred
        else _sampled(token_id, reports.get(index), spec.params.logprobs or 0)
        for index, (token_id, spec) in enumerate(zip(token_ids, specs, strict=True))
    ]


def _best_of(rows: Tensor) -> tuple[list[int], NDArray[np.float32]]:
    """Return the index of each row's largest logit, and that logit; NaN counts as the largest."""
    if not rows.is_cpu:
        chosen = rows.argmax(-1, keepdim=True)
        return chosen[:, 0].tolist(), rows.gather(1, chosen)[:, 0].cpu().numpy()
    # On a CPU NumPy finds the same index, the first of equals, in a tenth of torch's time.
    numbers = rows.numpy()
    indices = numbers.argmax(-1)
    return indices.tolist(), numbers[np.arange(len(numbers)), indices]


def _mask_of(constraint: Constraint, begun: PendingMask, give_up: float) -> Choice | Barred:
    """Return a row's mask if it is ready before `give_up` on the monotonic clock."""
    try:
        return begun.result(max(0.0, give_up - time.monotonic()))
    except NotInTime:
        return constraint.late()


def _sampled(token_id: int, logprobs: Tensor | None, num_top: int) -> Sampled:
    if logprobs is None:
        return Sampled(token_id)
    best = torch.topk(logprobs, min(num_top, len(logprobs)))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Sampled(token_id, float(logprobs[token_id]), top)


def _adjust(row: Tensor, spec: SampleSpec, mask: Choice) -> None:
    """Apply penalties, bias and constraint to a row's logits in place."""
    params = spec.params
    if params.has_penalties:
        _penalise(row, spec)
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        row.index_add_(0, _ids(token_ids, row), torch.tensor(biases, device=row.device))
    ends: list[int] = []
    if spec.position < params.min_tokens:
        # A stop id beyond the vocabulary can never be sampled.
        ends = [i for i in end_token_ids(params, spec.eos_token_ids) if 0 <= i < len(row)]
    if isinstance(mask, Mask):
        _constrain(row, spec, mask, ends)
        return
    if isinstance(mask, AllBut):
        ends += mask.token_ids
    if ends:
        row[_ids(ends, row)] = float("-inf")


def _constrain(row: Tensor, spec: SampleSpec, mask: Mask, too_early: Sequence[int]) -> None:
    """Remove tokens that the constraint forbids, and end tokens that come too early, unless no
    other token is left."""
    allowed = torch.from_numpy(mask.allowed)
    own_ends = [i for i in spec.eos_token_ids if 0 <= i < len(row)]
    if mask.may_end and own_ends:
        allowed[own_ends] = True
    if too_early:
        later = allowed.clone()
        later[list(too_early)] = False
        allowed = later if bool(later.any()) else allowed
    row.masked_fill_(~allowed.to(row.device), float("-inf"))


def _penalise(row: Tensor, spec: SampleSpec) -> None:
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = _ids(list({*spec.prompt_ids, *spec.output_ids}), row)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if spec.output_ids and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(spec.output_ids)
        occurrences = torch.tensor(list(counts.values()), device=row.device)
        row[_ids(list(counts), row)] -= (
            params.presence_penalty + params.frequency_penalty * occurrences
        )


def _ids(token_ids: Sequence[int], row: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=row.device)


def _draw(row: Tensor, best: int, params: SamplingParams, number: float) -> int:
    """Sample a random token.

    Args:
      row: adjusted logits [vocab_size].
      best: index of the largest logit.
      params: temperature and filters.
      number: uniform in [0, 1).
    """
    # Shift before dividing: a tiny temperature then gives -inf instead of inf and NaN.
    # The best token's weight is exp(0) = 1, so min_p applies to the weights directly.
    scaled = (row - row[best]) / params.temperature
    if params.top_k == 0 and params.top_p >= 1.0:
        weights = scaled.exp_()
        return _pick(weights.where(weights >= params.min_p, 0.0), number)
    if params.top_k:
        values, indices = scaled.topk(min(params.top_k, len(scaled)))
        total = values.exp().sum(dtype=torch.float64)
    else:
        total = scaled.exp().sum(dtype=torch.float64)
        values, indices = _nucleus(scaled, params.top_p * total)
    weights = values.exp()
    before = weights.cumsum(0, dtype=torch.float64) - weights
    is_kept = (before < params.top_p * total) & (weights >= params.min_p)
    return int(indices[_pick(weights.where(is_kept, 0.0), number)])


def _nucleus(scaled: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and indices of the best tokens, sorted, at least up to the given mass."""
    count = TOP_P_CANDIDATES
    while True:
        values, indices = scaled.topk(min(count, len(scaled)))
        if count >= len(scaled) or values.exp().sum(dtype=torch.float64) >= mass:
            return values, indices
        count *= 8


def _pick(weights: Tensor, number: float) -> int:
    """Return the first index whose cumulative share of the weights exceeds a number."""
    cumulative = weights.cumsum(0, dtype=torch.float64)
    total = cumulative[-1]
    index = torch.searchsorted(cumulative, number * total, right=True)
    # Clamped: a product that rounds up to the total would give an index after the last token with
    # weight, and NaN (overflowing activations) an index beyond the vocabulary.
    last = torch.searchsorted(cumulative, total)
    return min(int(index), int(last), len(weights) - 1)
