"""Golden tokens: the first greedy tokens of some prompts, which verify a loaded model.

`triolet model probe` computes them, and a worker checks them when it loads the model. Both run on
the device thread before the first request.
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
      prompts: prompts with their golden tokens.
      place: file that holds them, for errors.
    """

    prompts: tuple[GoldenPrompt, ...]
    place: str

    @property
    def num_tokens(self) -> int:
        """Number of golden tokens of all prompts."""
        return sum(len(one.token_ids) for one in self.prompts)


class GoldenSteps:
    """Computes and checks golden tokens on a model that was just loaded.

    Args:
      runner: computes steps.
      ledger: leases of the pool, empty.
      block_size: tokens per block.
      max_model_len: longest sequence.
      model: the model's shape.
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
        """Return the first greedy tokens of prompts: one step for all prompts, then decode steps.

        Args:
          prompts: token ids, at least one per prompt.
          num_tokens: number of golden tokens per prompt.

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
        """Check golden tokens in two steps: the prompts, then all golden tokens but the last of
        each prompt, computed like speculated tokens. One more row is sampled on the host to load
        its code.

        Args:
          golden: expected tokens for this model version and arithmetic.

        Returns:
          Seconds that the prompts took.

        Raises:
          ModelError: the model computed other tokens.
          ConfigError: the KV pool or the context is too small.
        """
        prompts = golden.prompts
        largest = max(max(*one.token_ids, *one.golden_ids) for one in prompts)
        if largest >= self._vocab_size:
            raise ModelError(
                f"{golden.place} has golden tokens up to {largest}, but the vocabulary has only "
                f"{self._vocab_size} tokens; {_REMEDY}"
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
            assert sampled is not None, "every row samples"
            chosen.append(sampled.token_id)
        return chosen

    @contextmanager
    def _leased(self, lengths: Sequence[int]) -> Iterator[list[list[int]]]:
        """Lease a block table for each sequence."""
        if max(lengths) > self._max_model_len:
            raise ConfigError(
                f"max_model_len is {self._max_model_len}, but the golden tokens of this version "
                f"are sequences of up to {max(lengths)} tokens; raise it"
            )
        sizes = [-(-length // self._block_size) for length in lengths]
        try:
            blocks = self._ledger.lease(_LEASE, sum(sizes))
        except CapacityError:
            raise ConfigError(
                f"kv_pool_bytes leaves {self._ledger.total_blocks} blocks, but the golden tokens "
                f"of this version need {sum(sizes)}; raise it"
            ) from None
        try:
            left = iter(blocks)
            yield [[next(left) for _ in range(size)] for size in sizes]
        finally:
            self._ledger.release(_LEASE)


_REMEDY: Final = (
    "`triolet model probe REF --replace` computes them again, on a machine that is known to work"
)


def _decode_row(
    prompt: Sequence[int],
    golden_ids: Sequence[int],
    count: int,
    table: Sequence[int],
    params: SamplingParams = _GREEDY,
) -> StepRow:
    """Return the row that samples the token after the first `count` golden ones."""
    spec = SampleSpec(params, count, prompt, tuple(golden_ids[:count]))
    token_id = golden_ids[count - 1]
    return StepRow([token_id], len(prompt) + count - 1, table, spec, is_decode=True)


def _require_equal(golden: Expected, prompt: GoldenPrompt, computed: tuple[int, ...]) -> None:
    expected = prompt.golden_ids
    if computed == expected:
        return
    # Tokens after the first difference were computed from the expected ones, so they mean nothing.
    pairs = enumerate(zip(computed, expected, strict=True))
    same = next(at for at, (got, wanted) in pairs if got != wanted)
    raise ModelError(
        f"the model's tokens differ from the golden tokens in {golden.place}: after the prompt "
        f"{list(prompt.token_ids)} expected {list(expected)}, got {list(computed[: same + 1])}; it "
        "is not served. If the error persists with worker.engine.snapshots.keep=false, check this "
        f"machine's memory and run `triolet model verify`; if the tokens are wrong, {_REMEDY}"
    )
