"""Tokens of a scripted model for tests: the real sampler and grammars choose them from logits that
a script provides."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch
from tokenizers import Tokenizer

from engine.model_config import load_model_config
from engine.sampler import sample

from .scripted_model import SCRIPT, read_script, says

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.batch import Sampled, SampleSpec, StepRow

SURE: Final = 100.0
"""Logit of the script's token; all others have 0, so that no temperature up to 2 chooses them."""
CACHED_PROMPTS: Final = 64
"""Tokenized answers to cache: more than the rows of a step."""


class ScriptedTokens:
    """Chooses the tokens of a scripted model.

    Args:
      directory: directory of the model; its script may be replaced at any time.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / SCRIPT
        self._vocab_size = load_model_config(directory).vocab_size
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._answer = lru_cache(CACHED_PROMPTS)(self._tokenize)

    def __call__(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Choose the script's tokens."""
        specs = [row.sample for row in rows if row.sample is not None]
        logits = torch.zeros(len(specs), self._vocab_size)
        for index, spec in enumerate(specs):
            logits[index, self._next_token(spec)] = SURE
        chosen = iter(sample(logits, specs))
        return [None if row.sample is None else next(chosen) for row in rows]

    def _next_token(self, spec: SampleSpec) -> int:
        status = self._path.stat()
        version = (status.st_ino, status.st_mtime_ns)
        answer = self._answer(tuple(spec.prompt_ids), version)
        return answer[spec.position] if spec.position < len(answer) else spec.eos_token_ids[0]

    def _tokenize(self, prompt_ids: tuple[int, ...], version: tuple[int, int]) -> tuple[int, ...]:
        del version  # part of the cache's key
        prompt = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        text = says(read_script(self._path), prompt)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
