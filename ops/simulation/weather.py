"""The network between simulated processes: partitions by name, and a trace of everything sent.

Knows names of processes and directions; what becomes of a single frame is memory_pipe's to draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transport.memory_network import MemoryNetwork
from transport.memory_pipe import Conditions

from .clock import ClockAlarm
from .faults import CALM, Fault

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from transport.memory_pipe import LinkName

    from .trace import Trace

PREFIX = "memory:"
KV = "/kv"


def control_address(name: str) -> str:
    """Return where servers reach a worker."""
    return f"{PREFIX}{name}"


def kv_address(name: str) -> str:
    """Return where prefill workers reach a decode worker."""
    return f"{PREFIX}{name}{KV}"


class _Route(NamedTuple):
    """One direction of one link: names of sender and receiver, and how the trace has it."""

    ends: tuple[str, str]
    text: str


class Weather(Conditions):
    """See transport.memory_pipe.Conditions.

    Args:
      seed: decides every fault.
      trace: takes down what is sent.

    Attributes:
      partitions: (sender, receiver) names between which nothing gets through.
      num_delayed: frames that were sent into a slow network.
      num_cut_one_way: frames that vanished where the way back was open.
    """

    def __init__(self, seed: int, trace: Trace) -> None:
        super().__init__(seed, CALM)
        self.partitions: set[tuple[str, str]] = set()
        self.num_delayed = 0
        self.num_cut_one_way = 0
        self._trace = trace
        self._routes: dict[tuple[LinkName, str], _Route] = {}

    def is_cut(self, link: LinkName, direction: str) -> bool:
        """Return whether a partition lies between sender and receiver."""
        if not self.partitions:
            return False
        ends = self._route(link, direction).ends
        if ends not in self.partitions:
            return False
        if ends[::-1] not in self.partitions:
            self.num_cut_one_way += 1
        return True

    def make_alarm(self) -> ClockAlarm:
        """Let receivers wait for the simulator's own clock."""
        return ClockAlarm()

    def on_put(self, link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
        """Take a message down."""
        route = self._route(link, direction)
        if self.faults.max_delay_s > CALM.max_delay_s:
            self.num_delayed += 1
        fate = "CUT " if route.ends in self.partitions else ""
        self._trace.sent(route.text, parts, fate)

    def count(self, happened: Counter[Fault]) -> None:
        """Add what the network did."""
        counts = self.counts
        happened[Fault.LOSS] += counts.lost
        happened[Fault.DUPLICATION] += counts.duplicated
        happened[Fault.REORDER] += counts.reordered
        happened[Fault.CORRUPTION] += counts.corrupted
        happened[Fault.AFTERLIFE] += counts.outlived
        happened[Fault.DELAY] += self.num_delayed
        happened[Fault.ONE_WAY] += self.num_cut_one_way
        happened[Fault.PARTITION] += counts.cut - self.num_cut_one_way

    def _route(self, link: LinkName, direction: str) -> _Route:
        route = self._routes.get((link, direction))
        if route is None:
            bound = link[0].removeprefix(PREFIX).removesuffix(KV)
            connecting = link[1].split(b":")[1].decode()
            sender, receiver = (connecting, bound) if direction == "up" else (bound, connecting)
            route = _Route((sender, receiver), f"{sender} > {receiver}")
            self._routes[link, direction] = route
        return route


def make_network(seed: int, trace: Trace) -> tuple[MemoryNetwork, Weather]:
    """Return a network and what rules it."""
    network = MemoryNetwork(seed)
    weather = Weather(seed, trace)
    network.conditions = weather
    return network, weather
