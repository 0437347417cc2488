"""What is decided upon when somebody comes, and what was expected of whoever was taken on.

Pure data. Knows sizes, classes and times; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from triolet.service_class import Claim, ServiceClass

    from .on_workers import Prompt


class Ask(NamedTuple):
    """What is decided upon.

    Attributes:
      claim: whose it is, and of which class.
      num_tokens: of its prompt, or the least that it may have.
      deadline_s: within which all of it has to be done.
      key: names what it asks for, whoever asks again; 0 for nothing.
      draw: between 0 and 1, at random.
      together_tokens: of all prompts that come in one request with it; 0 if it comes alone.
      is_unread: its prompt was not looked at yet.
      is_modest: its tenant asks for less than its share, beside others.
    """

    claim: Claim
    num_tokens: int
    deadline_s: float
    key: int = 0
    draw: float = 0.5
    together_tokens: int = 0
    is_unread: bool = False
    is_modest: bool = False

    @property
    def all_tokens(self) -> int:
        """Prompt tokens that come if it is taken on."""
        return max(self.num_tokens, self.together_tokens)


@dataclass(slots=True)
class Forecast:
    """What was expected of a request that was taken on, to learn from.

    Attributes:
      service_class: whose deadline it has.
      num_tokens: of its prompt.
      line_s: predicted wait in the line, uncorrected; None if nothing was known.
      ttft_s: predicted first token; None likewise.
      first_token_by: after which its first token is worth nothing; None for never.
      slo_s: of its class; None for none.
      computing_s: what workers had to compute before its first token, at dispatch.
      idle_s: in which no worker could have taken anybody, before it came.
      is_owed: it has neither a first token nor an end.
      on_worker: as it counts there, since it was dispatched.
    """

    service_class: ServiceClass
    num_tokens: int
    line_s: float | None
    ttft_s: float | None
    first_token_by: float | None
    slo_s: float | None
    computing_s: float = 0.0
    idle_s: float = 0.0
    is_owed: bool = True
    on_worker: Prompt | None = None

    def of_sibling(self, due: float) -> Forecast:
        """Return what is expected of another one of the same request, which waits for its siblings
        and is due with the answer: nothing is to be learnt from how long that is."""
        by = None if self.first_token_by is None else due
        return replace(self, line_s=None, ttft_s=None, first_token_by=by, slo_s=None)
