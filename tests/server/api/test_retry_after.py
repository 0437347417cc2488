"""Tests of the Retry-After times in error responses."""

from __future__ import annotations

from server.api.errors import MAX_RETRY_AFTER_S, RETRY_JITTER, error_headers
from triolet.errors import crowded_out, overloaded


def test_a_promised_time_is_said_as_it_is_however_far() -> None:
    headers = error_headers(crowded_out("full", 300.25, is_spread=True))
    assert headers == {"retry-after": "301", "retry-after-ms": "300250"}


def test_any_other_time_is_spread_and_official_clients_bear_it() -> None:
    told = {float(error_headers(overloaded("full", 60.0))["retry-after-ms"]) for _ in range(50)}
    assert len(told) > 1
    assert all(60_000 <= one <= 60_001 * (1 + RETRY_JITTER) for one in told)
    far = error_headers(overloaded("full", 300.0))
    assert float(far["retry-after"]) == MAX_RETRY_AFTER_S
