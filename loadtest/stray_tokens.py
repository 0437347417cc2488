"""Tokens that nobody wanted any more: what workers computed for requests that were cut.

Reads log lines and audits; opens no sockets. Two sums are made. What the server had received when
it let a request go, against what decode had computed when it ended the attempt: the difference was
under way. And all that decode ever computed, prompts not counted, against the tokens of all its
attempts: the difference went to attempts that ended while their step ran, and must be just that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class StrayTokens:
    """What a run of cut requests cost beyond what was wanted.

    Attributes:
      cut: requests whose client left while they ran.
      under_way: per request that decode knew, tokens that it computed and the server never took.
      late_rows: rows of steps that returned after their attempt had ended.
      unaccounted: rows that decode computed and that belong to no attempt, beyond the late ones.
    """

    cut: int
    under_way: list[int]
    late_rows: int
    unaccounted: int

    @property
    def wrongs(self) -> list[str]:
        """What must not be."""
        wrongs = []
        if self.unaccounted:
            wrongs.append(f"{self.unaccounted} computed tokens belong to no attempt")
        if self.late_rows > self.cut:
            wrongs.append(f"{self.late_rows} late rows for {self.cut} cut requests")
        return wrongs


def stray_tokens(
    entries: Iterable[Mapping[str, Any]], audits: Sequence[Mapping[str, Any]]
) -> StrayTokens:
    """Add up.

    Args:
      entries: the log lines of the server and its workers.
      audits: of the workers, as `/fleet/audit` tells them.
    """
    decode = {audit["name"]: audit for audit in audits if audit["role"] == "decode"}
    received: dict[str, int] = {}
    computed: dict[str, int] = {}
    rows = 0
    for entry in entries:
        if entry.get("event") == "request_ended" and entry["outcome"] == "client_gone":
            received[entry["request_id"]] = entry["completion_tokens"]
        elif entry.get("event") == "attempt_ended" and entry["process"] in decode:
            computed[entry["attempt"].split("/")[0]] = entry["num_tokens"]
            # The first token came with the prompt, whoever computed that.
            rows += max(0, entry["num_tokens"] - 1)
    late_rows = sum(audit["late_rows"] for audit in decode.values())
    return StrayTokens(
        cut=len(received),
        under_way=[
            max(0, tokens - received[request_id])
            for request_id, tokens in computed.items()
            if request_id in received
        ],
        late_rows=late_rows,
        unaccounted=sum(_generated(audit) for audit in decode.values()) - rows,
    )


def _generated(audit: Mapping[str, Any]) -> int:
    """Return the tokens that a worker computed of answers, for attempts that were still there."""
    total: int = audit["computed_tokens"] - audit["prompt_tokens"] - audit["late_tokens"]
    return total
