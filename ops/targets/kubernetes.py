"""A fleet on Kubernetes. Its autoscaler (KEDA or HPA) reads the desired numbers from the servers'
metrics, so this target sets the numbers and calls no API of Kubernetes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .target import Observed

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.ids import Place

    from .desired import DesiredStore


class KubernetesTarget:
    """The workers of one fleet. See `Target`.

    Args:
      store: the desired numbers.
    """

    def __init__(self, store: DesiredStore) -> None:
        self._store = store

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
