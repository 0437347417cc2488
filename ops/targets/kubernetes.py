"""A fleet on Kubernetes. Its autoscaler (KEDA or HPA) reads the desired numbers from the servers'
metrics, so this target sets the numbers and calls no API of Kubernetes.
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
    """

    def __init__(self, store: DesiredStore) -> None:
        self._store = store

    def check(self, place: Place) -> None:
        """See `Target`."""
        if place.role is Role.SERVER:
            raise ConfigError(
                "the number of servers on Kubernetes is not set here: their autoscaler follows "
                "processor time, within the bounds of its manifest"
            )

    async def scale(self, place: Place, count: int, tell: Callable[[str], object]) -> None:
        """Set the desired number. The autoscaler acts on it after its next poll."""
        await self._store.set(place, count)
        tell(f"the autoscaler is told {count} of {place}")

    async def observe(self) -> dict[Place, Observed]:
        """Return the desired numbers, and the workers that are registered in Redis."""
        desired, registered = await self._store.numbers(), await self._store.registered()
        return {
            place: Observed(desired.get(place), registered[place])
            for place in sorted({*desired, *registered})
        }
