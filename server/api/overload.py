"""What the surface does about overload: refuses before it works, and says what was cut.

Knows the request that is being answered, if it is one of HTTP; decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio
from quart import has_request_context

from .body import current_scope, deadline_s
from .claims import current_scheduling
from .resuming import current_key

if TYPE_CHECKING:
    from triolet.service_class import Scheduling

    from .schemas import GenerationFields
    from .services import Services

LEVEL_HEADER: Final = "x-triolet-brownout"
"""On answers that are shorter than their clients asked for: the level of brownout."""
CAP_HEADER: Final = "x-triolet-max-tokens"
"""With it: how long the answer may get."""


def refuse_early(fields: GenerationFields, services: Services) -> None:
    """Raise for a request that waits too long whatever its prompt is, before that is tokenised.

    Whose answer may run already, or may be kept, is not refused here.

    Raises:
      RequestError: 503.
    """
    if not has_request_context() or current_key() is not None:
        return
    if fields.response_cache == "allow" and services.config.response_cache.max_bytes:
        return
    live = current_scope()
    within_s = deadline_s(services.config, is_streamed=bool(fields.stream))
    scheduling = current_scheduling(fields.service_tier)
    services.fleet.admission.refuse_early(
        scheduling, live.request_id, live.key, within_s, trio.current_time()
    )


def own_ask_key() -> int:
    """Return what names the request that is being answered; 0 if its prompt has to."""
    return current_scope().key if has_request_context() else 0


def capped(
    max_tokens: int,
    fields: GenerationFields,
    prompt_tokens: int,
    scheduling: Scheduling,
    services: Services,
) -> int:
    """Return how many tokens an answer may have, of those asked for; the response says so."""
    admission = services.fleet.admission
    cap = admission.max_tokens(scheduling, prompt_tokens)
    if cap is None or max_tokens <= max(cap, fields.min_tokens or 0):
        return max_tokens
    cap = max(cap, fields.min_tokens or 0)
    if has_request_context():
        headers = current_scope().headers
        headers[LEVEL_HEADER] = str(admission.level)
        headers[CAP_HEADER] = str(cap)
    return cap
