"""What a check of `triolet doctor` found. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class FindingStatus(StrEnum):
    """How serious a finding is; only `fail` keeps Triolet from working."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
      subject: what was looked at.
      status: how it is.
      detail: what was seen.
      remedy: what to do; empty if nothing.
    """

    subject: str
    status: FindingStatus
    detail: str
    remedy: str = ""
