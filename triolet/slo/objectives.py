"""Reads service level objectives from a file in a subset of OpenSLO v1; unknown fields are errors.
The server counts events for them, and `triolet slo rules` writes Prometheus rules for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from ..errors import ConfigError, said_by
from ..service_class import ServiceClass
from ..units import MIB, parse_span

if TYPE_CHECKING:
    from ..config import ObjectivesConfig

DEFAULT_FILE: Final = Path(__file__).with_name("slo.yaml")
MAX_FILE_BYTES: Final = MIB
"""Largest file of objectives. One objective usually takes some hundred bytes."""
FREEZE: Final = "freeze rollouts at 0"
"""Budget policy: no rollout may begin while the budget is spent."""
WINDOWS_S: Final = range(7 * 86_400, 90 * 86_400 + 1, 86_400)
"""Allowed windows, in whole days: longer than the windows of alerts, and not longer than
counts in memory are useful."""
CLASSES: Final = {one.name.lower(): one for one in ServiceClass}


class Indicator(StrEnum):
    """The kind of event that an objective counts (docs/SLO.md)."""

    AVAILABILITY = "availability"
    STREAM_COMPLETION = "stream-completion"
    FIRST_TOKEN = "first-token"
    INTER_TOKEN = "inter-token"
    QUEUE_WAIT = "queue-wait"


TIMES: Final = frozenset({Indicator.FIRST_TOKEN, Indicator.INTER_TOKEN, Indicator.QUEUE_WAIT})
"""Indicators that need a threshold."""


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """One objective.

    Attributes:
      name: its name, unique in its file.
      service: name of the service, for labels.
      description: one sentence for alerts; may be empty.
      indicator: what it counts.
      target: share of events that must be good, between 0 and 1.
      window_s: rolling window of the error budget.
      threshold_s: longest good time; None for indicators without one.
      models: public names of the models that it covers; empty for all.
      classes: service classes that it covers; empty for all.
      freezes: whether no rollout may begin while its budget is spent.
    """

    name: str
    service: str
    description: str
    indicator: Indicator
    target: float
    window_s: int
    threshold_s: float | None
    models: frozenset[str]
    classes: frozenset[ServiceClass]
    freezes: bool

    @property
    def budget(self) -> float:
        """The error budget: share of events that may be bad."""
        return round(1 - self.target, 12)

    def covers(self, model: str, service_class: ServiceClass) -> bool:
        """Return whether it covers requests of this class to this model."""
        is_model_covered = not self.models or model in self.models
        return is_model_covered and (not self.classes or service_class in self.classes)


class OpenSloAnnotations(Struct, frozen=True, forbid_unknown_fields=True):
    """Annotations: settings for which OpenSLO has no field."""

    model: str = msgspec.field(default="", name="triolet/model")
    class_: str = msgspec.field(default="", name="triolet/class")
    policy: Literal["freeze rollouts at 0", "none"] = msgspec.field(
        default="none", name="triolet/budget-policy"
    )


class OpenSloMetadata(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Name and annotations."""

    name: Annotated[str, Meta(pattern=r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
    annotations: OpenSloAnnotations = OpenSloAnnotations()


class OpenSloWindow(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Window of the error budget."""

    duration: str
    is_rolling: bool


class OpenSloTarget(Struct, frozen=True, forbid_unknown_fields=True):
    """Target, and threshold of times."""

    target: Annotated[float, Meta(gt=0, lt=1)]
    op: Literal["lte"] | None = None
    value: Annotated[float, Meta(gt=0, le=86_400)] | None = None


class OpenSloSpec(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The indicator, the window and the target."""

    service: Annotated[str, Meta(min_length=1, max_length=63)]
    indicator_ref: str
    time_window: Annotated[list[OpenSloWindow], Meta(min_length=1, max_length=1)]
    budgeting_method: Literal["Occurrences"]
    objectives: Annotated[list[OpenSloTarget], Meta(min_length=1, max_length=1)]
    description: Annotated[str, Meta(max_length=1050)] = ""


class OpenSloDocument(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One document of the file."""

    api_version: Literal["openslo/v1"]
    kind: Literal["SLO"]
    metadata: OpenSloMetadata
    spec: OpenSloSpec


def read_objectives(config: ObjectivesConfig) -> tuple[ServiceObjective, ...]:
    """Read the configured file.

    Raises:
      ConfigError: it cannot be read, or has something that the server cannot measure.
    """
    path = DEFAULT_FILE if config.file is None else Path(config.file)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the objectives cannot be read: {said_by(error)}") from None
    try:
        return parse_objectives(content, config.max_objectives)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_objectives(content: bytes, most: int) -> tuple[ServiceObjective, ...]:
    """Return the objectives of a file's content, in its order.

    Raises:
      ConfigError: it is not OpenSLO, or has something that the server cannot measure.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    try:
        documents = [one for one in yaml.safe_load_all(content) if one is not None]
    # A tag with a wrong value raises whatever its conversion raises.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"this is not YAML: {' '.join(str(error).split())}") from None
    if not 1 <= len(documents) <= most:
        raise ConfigError(f"the file holds {len(documents)} objectives; allowed: 1 to {most}")
    found = tuple(_objective(one, number) for number, one in enumerate(documents, 1))
    [(name, count)] = Counter(one.name for one in found).most_common(1)
    if count > 1:
        raise ConfigError(f"{count} objectives are named {name}; give each its own name")
    if len({one.threshold_s for one in found if one.indicator is Indicator.INTER_TOKEN}) > 1:
        raise ConfigError(
            f"objectives for {Indicator.INTER_TOKEN} have different values; give all the "
            "same, because servers compare all gaps with one value"
        )
    return found


def _objective(document: Any, number: int) -> ServiceObjective:  # noqa: ANN401 (YAML's)
    try:
        read = msgspec.convert(document, OpenSloDocument)
    except msgspec.ValidationError as error:
        raise ConfigError(f"document {number}: {error}") from None
    spec, notes = read.spec, read.metadata.annotations
    [window], [goal] = spec.time_window, spec.objectives
    window_s = parse_span(window.duration) or 0
    classes = set(_words(notes.class_))
    wants_time = spec.indicator_ref in TIMES
    has_time = (goal.op is not None, goal.value is not None)
    if spec.indicator_ref not in set(Indicator):
        trouble = f"indicatorRef is {spec.indicator_ref!r}; allowed: {', '.join(Indicator)}"
    elif window_s not in WINDOWS_S or not window.is_rolling:
        trouble = (
            f"timeWindow is {window.duration!r}, isRolling {str(window.is_rolling).lower()}; "
            "allowed: 7d to 90d, isRolling true"
        )
    elif has_time != (wants_time, wants_time):
        needed = "`op: lte` and `value`, in seconds" if wants_time else "only `target`"
        trouble = f"an objective for {spec.indicator_ref} has {needed}"
    elif unknown := classes - CLASSES.keys():
        trouble = f"triolet/class names {min(unknown)!r}; allowed: {', '.join(CLASSES)}"
    else:
        return ServiceObjective(
            read.metadata.name,
            spec.service,
            spec.description,
            Indicator(spec.indicator_ref),
            goal.target,
            window_s,
            goal.value,
            frozenset(_words(notes.model)),
            frozenset(CLASSES[name] for name in classes),
            notes.policy == FREEZE,
        )
    raise ConfigError(f"objective {read.metadata.name}: {trouble}")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
