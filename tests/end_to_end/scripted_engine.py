"""The engine of a scripted model: the real pool, ledger, sampler and grammars, and logits that a
script decides instead of the model's layers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch
from tokenizers import Tokenizer

from engine.sampler import sample
from worker.local_engine import LocalEngine

from .scripted_model import SCRIPT, read_script, says

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.batch import Sampled, SampleSpec, StepRow

SURE: Final = 100.0
"""Logit of the script's token, beside 0 of all others: no temperature up to 2 chooses another."""
CACHED_PROMPTS: Final = 64
"""Answers that are kept as tokens: more than the rows of a step."""


class Script:
    """The answers of one model, by prompt.

    Args:
      directory: of the model; its script may be replaced at any time.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / SCRIPT
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._answer = lru_cache(CACHED_PROMPTS)(self._tokenize)

    def answer(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the completion of a prompt, without its end token."""
        status = self._path.stat()
        return self._answer(tuple(prompt_ids), (status.st_ino, status.st_mtime_ns))

    def _tokenize(self, prompt_ids: tuple[int, ...], version: tuple[int, int]) -> tuple[int, ...]:
        del version  # part of the cache's key
        prompt = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        text = says(read_script(self._path), prompt)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


class ScriptedEngine(LocalEngine):
    """The real engine, whose rows that choose tokens are not computed. What becomes a vector is."""

    script: Script

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Choose the script's tokens."""
        pooled = [row for row in rows if row.pool is not None]
        if pooled:
            super().step(pooled)
        specs = [row.sample for row in rows if row.sample is not None]
        logits = torch.zeros(len(specs), self.vocab_size)
        for index, spec in enumerate(specs):
            logits[index, self._next_token(spec)] = SURE
        chosen = iter(sample(logits, specs))
        return [None if row.sample is None else next(chosen) for row in rows]

    def _next_token(self, spec: SampleSpec) -> int:
        answer = self.script.answer(spec.prompt_ids)
        return answer[spec.position] if spec.position < len(answer) else spec.eos_token_ids[0]


def scripted_engine(directory: Path) -> type[ScriptedEngine]:
    """Return the engine of the model in a directory."""
    return type("EngineOfAScript", (ScriptedEngine,), {"script": Script(directory)})
