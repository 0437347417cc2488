"""Golden tokens: the first greedy tokens of some prompts, by which a loaded model is recognised.

Computed where they are made, checked where a model is loaded: on the device thread, before there
are requests.
"""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.errors import CapacityError, ConfigError, ModelError
from triolet.sampling import SamplingParams

from ..batch import SampleSpec, StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from store.measured import GoldenPrompt, MeasurementKey

    from ..block_ledger import BlockLedger
    from ..model_config import ModelConfig
    from ..runner import Runner

    FindGolden: TypeAlias = Callable[[MeasurementKey], "Expected | None"]
    """Returns the golden tokens for a key, None if there are none."""

_GREEDY: Final = SamplingParams(temperature=0.0)
_BY_THE_HOST: Final = SamplingParams(temperature=1.0, top_p=0.9)
_LEASE: Final = "golden"


class Expected(NamedTuple):
    """Golden tokens that a model should compute.

    Attributes:
      prompts: with their tokens.
      place: where that is written.
    """

    prompts: tuple[GoldenPrompt, ...]
    place: str

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(one.token_ids) for one in self.prompts)


class GoldenSteps:
    """Steps of a model that has just been loaded.

    Args:
      runner: computes them.
      ledger: of its pool, empty.
      block_size: tokens of a block.
      max_model_len: the longest sequence.
      model: its shape.
    """

    def __init__(
        self,
        runner: Runner,
        ledger: BlockLedger,
        block_size: int,
        max_model_len: int,
        model: ModelConfig,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._vocab_size = model.vocab_size

    def compute(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
        """Return the first greedy tokens of prompts: a step for all prompts, then decode steps.

        Args:
          prompts: token ids of the vocabulary, at least one in each.
          num_tokens: of each.

        Raises:
          ConfigError: the KV pool or the context is too small.
        """
        lengths = [len(prompt) + num_tokens - 1 for prompt in prompts]
        with self._leased(lengths) as tables:
            chosen = [[first] for first in self._first(prompts, tables)]
            for _ in range(1, num_tokens):
                rows = [
                    _decode_row(prompt, own, len(own), table)
                    for prompt, own, table in zip(prompts, chosen, tables, strict=True)
                ]
                for own, token_id in zip(chosen, self._step(rows), strict=True):
                    own.append(token_id)
        return [tuple(own) for own in chosen]

    def check(self, golden: Expected) -> float:
        """Compute golden tokens in two steps: the prompts, then all tokens but the last of each,
        as guesses are. One row more is sampled by the host, whose code is thereby loaded too.

        Args:
          golden: what is expected; it must be of the model's version and this arithmetic.

        Returns:
          How long the prompts took [s].

        Raises:
          ModelError: other tokens came.
          ConfigError: the KV pool or the context is too small.
        """
        prompts = golden.prompts
        largest = max(max(*one.token_ids, *one.golden_ids) for one in prompts)
        if largest >= self._vocab_size:
            raise ModelError(
                f"{golden.place} has golden tokens up to {largest}, and the model has a vocabulary "
                f"of {self._vocab_size}; {_REMEDY}"
            )
        lengths = [len(one.token_ids) + len(one.golden_ids) for one in prompts]
        with self._leased(lengths) as tables:
            began_at = perf_counter()
            firsts = self._first([one.token_ids for one in prompts], tables)
            elapsed_s = perf_counter() - began_at
            rows = [
                _decode_row(one.token_ids, one.golden_ids, count, table)
                for one, table in zip(prompts, tables, strict=True)
                for count in range(1, len(one.golden_ids))
            ]
            one = prompts[0]
            by_the_host = _decode_row(one.token_ids, one.golden_ids, 1, tables[0], _BY_THE_HOST)
            following = iter(self._step([*rows, by_the_host]))
            for one, first in zip(prompts, firsts, strict=True):
                computed = (first, *(next(following) for _ in one.golden_ids[1:]))
                _require_equal(golden, one, computed)
        return elapsed_s

    def _first(
        self, prompts: Sequence[Sequence[int]], tables: Sequence[Sequence[int]]
    ) -> list[int]:
        return self._step(
            [
                StepRow(prompt, 0, table, SampleSpec(_GREEDY, 0, prompt))
                for prompt, table in zip(prompts, tables, strict=True)
            ]
        )

    def _step(self, rows: Sequence[StepRow]) -> list[int]:
        chosen = []
        for sampled in self._runner.step(rows):
            assert sampled is not None, "each row chooses"
            chosen.append(sampled.token_id)
        return chosen

    @contextmanager
    def _leased(self, lengths: Sequence[int]) -> Iterator[list[list[int]]]:
        """Give a table of blocks for each sequence."""
        if max(lengths) > self._max_model_len:
            raise ConfigError(
                f"max_model_len is {self._max_model_len}, and the golden tokens of this version "
                f"are sequences of up to {max(lengths)} tokens; raise it"
            )
        sizes = [-(-length // self._block_size) for length in lengths]
        try:
            blocks = self._ledger.lease(_LEASE, sum(sizes))
        except CapacityError:
            raise ConfigError(
                f"kv_pool_bytes leaves {self._ledger.total_blocks} blocks, and the golden tokens "
                f"of this version take {sum(sizes)}; raise it"
            ) from None
        try:
            left = iter(blocks)
            yield [[next(left) for _ in range(size)] for size in sizes]
        finally:
            self._ledger.release(_LEASE)


_REMEDY: Final = (
    "`triolet model probe REF --replace` makes them anew, on a machine that is known to be sound"
)


def _decode_row(
    prompt: Sequence[int],
    golden_ids: Sequence[int],
    count: int,
    table: Sequence[int],
    params: SamplingParams = _GREEDY,
) -> StepRow:
    """Return the row that chooses the token behind the first `count` golden ones."""
    spec = SampleSpec(params, count, prompt, tuple(golden_ids[:count]))
    token_id = golden_ids[count - 1]
    return StepRow([token_id], len(prompt) + count - 1, table, spec, is_decode=True)


def _require_equal(golden: Expected, prompt: GoldenPrompt, computed: tuple[int, ...]) -> None:
    expected = prompt.golden_ids
    if computed == expected:
        return
    # Behind the first difference tokens follow what was expected, and say nothing.
    pairs = enumerate(zip(computed, expected, strict=True))
    same = next(at for at, (got, wanted) in pairs if got != wanted)
    raise ModelError(
        f"the model computes other golden tokens than {golden.place} says: after the prompt "
        f"{list(prompt.token_ids)} expected {list(expected)}, got {list(computed[: same + 1])}; it "
        "is not served. If that stays so with worker.engine.snapshots.keep=false, look at this "
        f"machine's memory and at `triolet model verify`; if the tokens are wrong, {_REMEDY}"
    )
