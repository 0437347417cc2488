"""What a client's grammar may cost before it is refused: each bound with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from .config_queue import TurnsConfig
from .units import KIB, MIB, MILLISECONDS, SECONDS


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """Bounds on grammars that clients send, checked before a request is queued."""

    max_bytes: int = 16 * KIB
    """Of one schema, expression or grammar: what people write is far smaller."""
    max_depth: int = 32
    """Of nested brackets: compilers recurse."""
    cpu_s: float = 50 * MILLISECONDS
    """For compiling, in a process that is ended then, whatever it does. Real schemas take 1 to
    5 ms; in a worker a grammar is compiled beside running streams. Where these have every core,
    it gets a part of one, and takes as much longer by the clock."""
    memory_bytes: int = 512 * MIB
    """That compiling may take on top of what the process has."""
    wait_s: float = 5.0 * SECONDS
    """For a turn and for the result: grammars are compiled one at a time. Beyond it the request is
    refused as overload, and a process that does not answer is ended."""
    max_waiting: int = 1024
    """Grammars that may wait for their turn, of all tenants: full lines of sixteen of them."""
    max_waiting_each: int = 64
    """Of one tenant, or of one client address where there are no tenants: at 5 ms each a third of a
    second, and the costliest that there are 3 s. The next one gets a 429. Requests of one tenant
    that bring the same grammar at once are one."""
    max_remembered: int = 1024
    """Verdicts that are kept: clients send the same grammar again and again."""

    @property
    def turns(self) -> TurnsConfig:
        """Bounds of the lines."""
        return TurnsConfig(self.max_waiting, self.max_waiting_each)
