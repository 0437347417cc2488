"""What a model's makers recommend where a client says nothing: `generation_config.json`.

Knows the file and the ranges; a value that cannot work is a ModelError that names it. Where the
file is silent, the API's own defaults hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

FILE_NAME: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for the parameters that a request leaves out.

    Attributes:
      temperature: 0 is greedy.
      top_p: 1 is off.
      top_k: 0 is off.
      min_p: 0 is off.
      repetition_penalty: 1 is off.
      max_new_tokens: most tokens of an answer in a chat; None for as many as fit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


_RANGES: Final[dict[str, tuple[type, Callable[[float], bool], str]]] = {
    "temperature": (float, lambda value: 0 <= value <= 2, "0 to 2"),
    "top_p": (float, lambda value: 0 < value <= 1, "above 0, up to 1"),
    "top_k": (int, lambda value: value >= 0, "0 or more"),
    "min_p": (float, lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": (float, lambda value: 0 < value <= 10, "above 0, up to 10"),
    "max_new_tokens": (int, lambda value: value >= 1, "1 or more"),
}


def read_sampling_defaults(model_dir: str | Path) -> SamplingDefaults:
    """Read what a model directory recommends.

    Raises:
      ModelError: the file is broken, or recommends what cannot work.
    """
    path = Path(model_dir) / FILE_NAME
    if not path.exists():
        return SamplingDefaults()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}; correct or remove it") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no object; correct or remove it")
    found = {name: values[name] for name in _RANGES if values.get(name) is not None}
    for name, value in found.items():
        kind, is_allowed, allowed = _RANGES[name]
        is_number = isinstance(value, int) or (kind is float and isinstance(value, float))
        if isinstance(value, bool) or not is_number or not is_allowed(value):
            raise ModelError(f"{name} in {path} is {value!r}; allowed: {allowed}")
    return SamplingDefaults(**found)
