"""Some blobs at once, the largest first; the first failure ends all."""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..manifest import Descriptor
    from .client import Registry

Result = TypeVar("Result")
MAX_TRANSFERS: Final = 4
"""Connections at once: object stores give each some 100 MB/s, and each hashes on a core here."""


def for_each(
    registry: Registry, blobs: Iterable[Descriptor], action: Callable[[Descriptor], Result]
) -> dict[str, Result]:
    """Return what an action returns for each blob, by its digest.

    Args:
      registry: whose other transfers end where one fails.
      blobs: which; one that is named twice is handled once.
      action: called in some thread.

    Raises:
      Exception: whatever the action raised first.
    """
    order = sorted({one.digest: one for one in blobs}.values(), key=lambda one: -one.size)
    with ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="registry") as threads:
        futures = {one.digest: threads.submit(action, one) for one in order}
        try:
            for ended in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()  # of those that failed before others were told to stop
            return {digest: future.result() for digest, future in futures.items()}
        except BaseException:
            registry.give_up()
            threads.shutdown(cancel_futures=True)
            raise
