"""Read a model's rotary embedding parameters from its config; engine/rope.py computes with them.

Accepts `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from triolet.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


class RopeKind(StrEnum):
    """How the context is extended beyond the original training length."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    DIVISORS = "divisors"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters.

    Attributes:
      theta: base of the frequencies.
      factor: extension factor of the context.
      original_length: context length before the extension (llama3, yarn).
      low_freq_factor: wavelengths above `original_length / low_freq_factor` are stretched (llama3).
      high_freq_factor: wavelengths below `original_length / high_freq_factor` are kept (llama3).
      beta_fast: rotations over `original_length` above which a dimension is kept (yarn).
      beta_slow: rotations below which it is stretched (yarn).
      attention_factor: scale of cos and sin; None derives it from `factor` (yarn).
      divisors: a divisor for each frequency, from a GGUF file (divisors).
    """

    theta: float = 10_000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    divisors: tuple[float, ...] = ()


_REQUIRED: dict[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    RopeKind.YARN: ("factor",),
    RopeKind.DIVISORS: ("divisors",),
}


def read_rope(path: Path, fields: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read the rotary embedding from a config's fields.

    Args:
      path: path of the config, for errors.
      fields: the config's top level.
      max_position_embeddings: original length for a yarn config that has none.

    Raises:
      ModelError: the kind is unknown, or a parameter is missing or invalid.
    """
    values: dict[str, Any] = {}
    for section in ("rope_scaling", "rope_parameters"):
        part = fields.get(section) or {}
        if not isinstance(part, dict) or any(isinstance(v, dict) for v in part.values()):
            raise ModelError(f"{path}: {section} {part!r}; one set of parameters is supported")
        values.update(part)
    values.setdefault("rope_theta", fields.get("rope_theta") or 10_000.0)
    if values.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor is not 1; choose another model")
    name = values.get("rope_type") or values.get("type") or "default"
    try:
        kind = RopeKind(name)
    except ValueError:
        raise ModelError(
            f"{path}: rope scaling {name!r} is not supported; supported: {', '.join(RopeKind)}"
        ) from None
    missing = [key for key in _REQUIRED[kind] if values.get(key) is None]
    if missing:
        raise ModelError(f"{path}: rope scaling {name!r} needs {missing[0]}; fetch the file again")
    if values.get("mscale") or values.get("mscale_all_dim") or not values.get("truncate", True):
        raise ModelError(f"{path}: rope has mscale, or no truncate; choose another model")
    try:
        attention_factor = values.get("attention_factor")
        rope = RopeConfig(
            theta=float(values["rope_theta"]),
            kind=kind,
            factor=float(values.get("factor") or 1.0),
            original_length=int(
                values.get("original_max_position_embeddings") or max_position_embeddings
            ),
            low_freq_factor=float(values.get("low_freq_factor") or 1.0),
            high_freq_factor=float(values.get("high_freq_factor") or 4.0),
            beta_fast=float(values.get("beta_fast") or 32.0),
            beta_slow=float(values.get("beta_slow") or 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
            divisors=tuple(float(divisor) for divisor in values.get("divisors") or ()),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path}: rope parameters: {error}; fetch the file again") from error
    if not (
        rope.theta > 1
        and rope.factor >= 1
        and rope.original_length >= 1
        and rope.high_freq_factor > rope.low_freq_factor > 0
        and rope.beta_fast > rope.beta_slow > 0
        and all(divisor > 0 for divisor in rope.divisors)
    ):
        raise ModelError(f"{path}: rope parameters {values} are out of range; fetch the file again")
    return rope
