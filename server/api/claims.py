"""What a request claims of the service: for whom, how early, with which share.

Knows the tenant that the running task serves, and whether this process made the request itself;
knows no queue.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from triolet.service_class import Claim, ServiceClass

from .keys import current_tenant

_IS_BATCH: Final[ContextVar[bool]] = ContextVar("is_batch", default=False)


def enter_batch() -> None:
    """Let the running task serve a line of a batch, whatever class it may ask for."""
    _IS_BATCH.set(True)


def own_claim() -> Claim:
    """Return what the request that the running task serves claims."""
    tenant = current_tenant()
    service_class = ServiceClass.BATCH if _IS_BATCH.get() else ServiceClass.DEFAULT
    return Claim("" if tenant is None else tenant.name, service_class=service_class)
