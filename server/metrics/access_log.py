"""The access log: one line for each request that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from triolet.adapter_keys import SHA256
from triolet.units import NANOS

if TYPE_CHECKING:
    from ..contract.request_events import RequestEnded

log = structlog.get_logger(__name__)


def write_access_line(ended: RequestEnded) -> None:
    """Log an ended request.

    Embedding inputs are logged at level debug: a client may send thousands at once, which would
    fill disks and take four tenths of the event loop's time.
    """
    facts, usage = ended.facts, ended.usage
    tell, event = (log.debug, "input_ended") if facts.is_input else (log.info, "request_ended")
    tell(
        event,
        request_id=facts.request_id.hex(),
        client_request_id=facts.client_request_id,
        tenant=facts.tenant,
        model=facts.model,
        model_digest=facts.model_digest or None,
        outcome=ended.outcome,
        phase=ended.phase,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=round(usage.queue_s, 4),
        ttft_s=None if usage.ttft_s is None else round(usage.ttft_s, 4),
        elapsed_s=round(ended.elapsed_s, 4),
        **_of_cost(ended),
    )


def _of_cost(ended: RequestEnded) -> dict[str, object]:
    """Return a request's cost, its adapter, and how `auto` chose its model."""
    facts, cost = ended.facts, ended.cost
    record: dict[str, object] = {} if cost is None else {"cost": cost.nanos / NANOS}
    if facts.adapter:
        record["adapter_digest"] = f"{SHA256}{facts.adapter.hex()}"
    if facts.auto is not None:
        record |= {"auto": facts.auto.reason, "auto_largest": facts.auto.largest}
        if cost is not None and cost.nanos_on_largest is not None:
            record["auto_largest_cost"] = cost.nanos_on_largest / NANOS
    return record
