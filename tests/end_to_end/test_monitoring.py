"""Tests that a running fleet exposes every metric of the dashboard and the alerts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

from tests.house.test_monitoring import OF_PROMETHEUS, RECORDS, expressions, family, selectors

if TYPE_CHECKING:
    from .fleet_process import FleetProcess

NOT_ALWAYS: Final = {
    "triolet_server_up",  # with several servers on one port
    "triolet_guard_limit_tokens",  # once there is a limit
    "triolet_line_tokens_per_second",  # once the queue's throughput is known
}


@pytest.mark.promise
@pytest.mark.slow
def test_a_running_server_shows_all_that_is_asked_for(fleet: FleetProcess) -> None:
    text = fleet.client.get("/metrics").text
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    names = {name for expression in expressions().values() for name in selectors(expression)[0]}
    wanted = {family(name) for name in names - RECORDS - OF_PROMETHEUS}
    assert len(wanted) > 50
    assert wanted - families <= NOT_ALWAYS


@pytest.mark.slow
def test_an_answer_that_is_given_again_is_the_one_that_was_computed(fleet: FleetProcess) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1, "seed": 11}
    body |= {"return_token_ids": True, "response_cache": "allow"}
    computed, found = (fleet.client.post("/v1/completions", json=body) for _ in range(2))
    headers = [answer.headers["x-triolet-cache"] for answer in (computed, found)]
    assert headers == ["miss", "hit"]
    anew = fleet.client.post("/v1/completions", json=body | {"response_cache": "refresh"})
    assert anew.headers["x-triolet-cache"] == "miss"
    one, two, three = (answer.json() for answer in (computed, found, anew))
    assert one["choices"] == two["choices"] == three["choices"]
    assert one["usage"] == two["usage"]
