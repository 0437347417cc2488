"""`KubernetesTarget`: a fleet on Kubernetes. It only writes the desired numbers to Redis; servers
export them as metrics, and an autoscaler (KEDA or HPA) acts on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.errors import ConfigError
from triolet.ids import Place, Role

from .target import Observed

if TYPE_CHECKING:
    from collections.abc import Callable

    from .desired import DesiredStore


class KubernetesTarget:
    """The workers of one fleet. See `Target`.

    Args:
      store: the desired numbers.
      members: the Redis in which workers register; None if servers find them by DNS.
    """

    def __init__(self, store: DesiredStore, members: DesiredStore | None) -> None:
        self._store, self._members = store, members

    def check(self, place: Place) -> None:
        """See `Target`."""
        if place.role is Role.SERVER:
            raise ConfigError(
                "the number of servers on Kubernetes cannot be set here: their autoscaler follows "
                "processor time; change the bounds in its manifest"
            )

    async def scale(self, place: Place, count: int, tell: Callable[[str], object]) -> None:
        """Set the desired number. The autoscaler acts on it after its next poll."""
        await self._store.set(place, count)
        tell(f"wrote {count} as the desired number of {place}; the autoscaler follows")

    async def observe(self) -> dict[Place, Observed]:
        """Return the desired numbers and, if workers register, how many are registered."""
        desired = await self._store.numbers()
        registered = None if self._members is None else await self._members.registered()
        return {
            place: Observed(desired.get(place), None if registered is None else registered[place])
            for place in sorted({*desired, *(registered or ())})
        }
