"""How much of other tenants' tokens is served before one has had so much of its own.

Pure. As if all were served at once like fluids, each at the speed of its weight: somebody with a
small backlog is done soon and counts with that, somebody with a large one with what it may have
meanwhile. Tenants are counted in groups of like duration, so that nothing depends on how many there
are; of the one group that is half done the answer may be up to twice too high.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tenant_queue import Flow


class _Group:
    """Flows whose backlogs last about equally long.

    Attributes:
      cost: tokens to be charged.
      weight: of all together.
      prompt_tokens: of those that wait.
      count: flows.
    """

    __slots__ = ("cost", "count", "prompt_tokens", "weight")

    def __init__(self) -> None:
        self.cost = 0
        self.weight = 0.0
        self.prompt_tokens = 0
        self.count = 0


class Fluid:
    """All flows of a class that are not skipped.

    Attributes:
      num_flows: how many.
      prompt_tokens: of all that wait in them.
    """

    def __init__(self) -> None:
        self.num_flows = 0
        self.prompt_tokens = 0
        self._groups: dict[int, _Group] = {}

    def show(self, flow: Flow[Any]) -> None:
        """Count a flow as it is now: waiting, or not at all."""
        shown = flow.shown
        if shown is not None:
            self._count(*shown, -1)
        if not flow.cost or flow.is_skipped:
            flow.shown = None
            return
        duration = math.frexp(flow.cost / flow.weight)[1]
        flow.shown = (duration, flow.cost, flow.weight, flow.prompt_tokens)
        self._count(*flow.shown, 1)

    def prompt_tokens_within(self, virtual_tokens: float, but: Flow[Any] | None) -> float:
        """Return the prompt tokens that all have had when somebody of weight 1 has had so many
        tokens.

        Args:
          virtual_tokens: tokens by weight.
          but: whose are left out; None for nobody's.
        """
        tokens = 0.0
        for duration, group in self._groups.items():
            cost, weight, prompt_tokens = group.cost, group.weight, group.prompt_tokens
            if but is not None and but.shown is not None and but.shown[0] == duration:
                cost, weight, prompt_tokens = (
                    cost - but.shown[1],
                    weight - but.shown[2],
                    prompt_tokens - but.shown[3],
                )
            if cost:
                tokens += prompt_tokens * min(1.0, weight * virtual_tokens / cost)
        return tokens

    def _count(
        self, duration: int, cost: int, weight: float, prompt_tokens: int, sign: int
    ) -> None:
        group = self._groups.get(duration)
        if group is None:
            group = self._groups[duration] = _Group()
        group.count += sign
        self.num_flows += sign
        self.prompt_tokens += sign * prompt_tokens
        if not group.count:
            del self._groups[duration]  # and with it what adding and taking away left of weights
            return
        group.cost += sign * cost
        group.weight += sign * weight
        group.prompt_tokens += sign * prompt_tokens
