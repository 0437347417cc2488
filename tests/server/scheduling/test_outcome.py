"""Tests of the table of outcomes: each has an error or a finish reason."""

from __future__ import annotations

import pytest

from server.contract.generation import CancelReason, FinishReason
from server.scheduling.outcome import FINISHED, Outcome, cancelled

from .fakes import server_config


def test_each_outcome_is_a_row_of_its_own() -> None:
    assert len(Outcome.__members__) == len(list(Outcome))
    assert set(FINISHED) == set(FinishReason)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_bad_end_has_status_and_code_and_a_good_one_has_neither(outcome: Outcome) -> None:
    row = outcome.value
    assert (row.status >= 400) == bool(row.code)
    assert not (row.code and row.finish)
    error = outcome.failure("words").error
    assert (error.status, error.code, error.param) == (row.status, row.code, row.param)


@pytest.mark.parametrize("reason", list(CancelReason))
def test_each_cancel_has_its_outcome(reason: CancelReason) -> None:
    failure = cancelled(reason, server_config())
    assert failure.error.status == failure.outcome.value.status
    assert failure.error.code == failure.outcome.value.code
