"""Result type of the checks of `triolet doctor`."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class FindingStatus(StrEnum):
    """Severity of a finding. Only `fail` keeps Triolet from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
      subject: what was checked.
      status: severity.
      detail: what was found.
      remedy: what to do; empty if nothing.
    """

    subject: str
    status: FindingStatus
    detail: str
    remedy: str = ""
