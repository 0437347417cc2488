"""The candidates of the benchmark: versions of the demo model, what is wrong with each, and how its
rollout should end."""

from __future__ import annotations

import json
from shutil import copytree
from typing import TYPE_CHECKING, Final, NamedTuple

from safetensors.torch import load_file, save_file

from ops.models.importing import WantedImport, import_model
from ops.models.model_directory import demo_model_path
from store.layout import ModelStore
from store.measured import MeasuredCapacity, MeasurementKey, keep_measured
from triolet.config import WeightFormat

from .device import COST, DeviceFault

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

MODEL: Final = "chat"
FIRST: Final = "v1"
"""Tag of the version that serves first."""
GOOD: Final = "good"
"""Tag of the candidate without faults."""
NORM: Final = "model.norm.weight"
SCALE: Final = 1.01
"""Factor between the last norms of two versions: each computes other bits, so each gets workers of
its own."""
MARKER: Final = 1999
"""Token of all prompts of one tenant, and of no others."""
LONG_TOKENS: Final = 80
"""Prompts above this are long."""
CAPACITY: Final = MeasuredCapacity(
    MeasurementKey("cpu", "float32", "timed", "timed"),
    1.0 / COST.token_s,
    COST.step_s,
    COST.row_s,
    0.0,
    1.0,
)
"""What a probe would measure of the devices that only take time."""
ANY: Final = ("promoted", "rolled_back", "paused")
TEMPLATE: Final = "{{- raise_exception('this template is broken') -}}"


class Candidate(NamedTuple):
    """A candidate.

    Attributes:
      name: its name, and its tag in the store.
      fault: faults of its devices once it gets requests; None for none.
      ends: phases in which its rollout should end or stop.
      template: chat template; empty for the model's.
      weight: factor of the weights of its last norm.
      is_always_faulty: whether the faults are there before it gets requests.
      golden: whether it answers golden prompts; without them other checks must find it.
      is_killed: whether processes of both versions, control and server are killed meanwhile.
      shadow_share: share of requests that are copied to it before its first step.
      max_verdict_s: longest time from the fault to the verdict.
      rounds: number of rollouts.
    """

    name: str
    fault: DeviceFault | None = None
    ends: tuple[str, ...] = ("rolled_back", "paused")
    template: str = ""
    weight: float = 1.0
    is_always_faulty: bool = False
    golden: bool = False
    is_killed: bool = False
    shadow_share: float = 0.0
    max_verdict_s: float | None = None
    rounds: int = 5

    @property
    def is_good(self) -> bool:
        """Return whether it may be promoted."""
        return "promoted" in self.ends


CANDIDATES: Final = (
    Candidate(GOOD, ends=("promoted",), golden=True),
    Candidate("errors90", DeviceFault(errors=0.9), max_verdict_s=10.0),
    Candidate("errors20", DeviceFault(errors=0.2), max_verdict_s=60.0),
    Candidate("slower", DeviceFault(slower=1.5)),
    Candidate("dearer", DeviceFault(dearer=2.0)),
    Candidate("template", template=TEMPLATE),
    Candidate(
        "nonfinite", DeviceFault(is_computed=True), weight=float("nan"), is_always_faulty=True
    ),
    Candidate("golden", DeviceFault(token=501), golden=True, rounds=2),
    # A fault of 3 % of the prompts may pass steps of 15 s.
    Candidate("long", DeviceFault(slower=3.0, longer_than=LONG_TOKENS), ends=ANY, rounds=1),
    Candidate("tenant", DeviceFault(marker=MARKER), rounds=1),
    Candidate("shadow", ends=("promoted",), shadow_share=0.3, rounds=1),
    Candidate("kills", ends=("promoted",), golden=True, is_killed=True, rounds=1),
)


def write_versions(
    folder: Path, candidates: tuple[Candidate, ...], *, has_costs: bool = True
) -> dict[str, str]:
    """Import a version for each candidate, and the first one. Return their digests by tag.

    Args:
      folder: gets the store `store`, and the directories of the models.
      candidates: the candidates.
      has_costs: whether their costs are known, so that rollouts compare them.
    """
    store = ModelStore(folder / "store")
    weights = load_file(demo_model_path() / "model.safetensors")
    digests = {}
    for number, one in enumerate((Candidate(FIRST), *candidates)):
        path = copytree(demo_model_path(), folder / one.name, dirs_exist_ok=True)
        factor = one.weight * SCALE**number
        changed: dict[str, Tensor] = weights | {NORM: weights[NORM] * factor}
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        if one.template:
            settings = path / "tokenizer_config.json"
            fields = json.loads(settings.read_text()) | {"chat_template": one.template}
            settings.write_text(json.dumps(fields))
        wanted = WantedImport(str(path), MODEL, one.name, None, WeightFormat.AUTO, may_link=False)
        digests[one.name] = import_model(store, wanted).digest
        if has_costs:
            with store.writing() as writer:
                keep_measured(writer, digests[one.name], [CAPACITY])
    return digests
