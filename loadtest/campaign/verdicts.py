"""What a run under faults was worth: compared with the run that nobody disturbed. Pure.

Takes stories, faults and log lines; opens nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..cancel_report import percentile
from .processes import attempts_of, seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .answers import Answer
    from .client import Story
    from .injectors import Injected

FREE_BOUND_S = 2.5
"""A lease lives 2 s without its owner, and the sweep that ends it comes within half a second."""
SERVER_KILL = "server-kill"
LEASE_EXPIRED = "lease_expired"
"""How a worker ends what its server does not name any more."""
CALM = "calm"
REFERENCE = "reference"
UNDISTURBED = (REFERENCE, CALM)


@dataclass(slots=True)
class Verdict:
    """One run.

    Attributes:
      dtype: that the workers computed in.
      fault: what was done, or the name of a run in which nothing was.
      injected: each fault that happened.
      requests: how many were asked.
      failed: those without an answer, and why.
      inexact: those whose answer differs from the reference, and where.
      hit: requests that needed more than one attempt or, when the server died, connection.
      pauses_s: the longest silence of each stream that was hit; for a broken connection, from
        noticing it to the first word of the next try.
      calm_pauses_s: the longest silence of each other stream.
      freed_s: per attempt of a dead server, how long after its death its blocks were free.
      noticed_s: per broken connection, how long after the death its client knew.
      logprob_distance: largest difference of a logprob from the reference's.
      leased_blocks: blocks that were still held afterwards.
      violations: what the audit objected to afterwards.
      elapsed_s: of the whole run.
    """

    dtype: str
    fault: str
    injected: list[Injected]
    requests: int
    failed: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    hit: int = 0
    pauses_s: list[float] = field(default_factory=list)
    calm_pauses_s: list[float] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)
    logprob_distance: float = 0.0
    leased_blocks: int = 0
    violations: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def wrongs(self) -> list[str]:
        """Everything for which the run does not count as passed."""
        wrongs = [*self.failed, *self.inexact, *self.violations]
        if self.fault not in UNDISTURBED and not self.hit:
            wrongs.append("the faults hit no request: nothing was shown")
        if self.leased_blocks:
            wrongs.append(f"{self.leased_blocks} blocks are still leased")
        if self.freed_s and max(self.freed_s) > FREE_BOUND_S:
            wrongs.append(f"a dead server's blocks were held for {max(self.freed_s):.2f} s")
        if self.fault == SERVER_KILL and not self.freed_s:
            wrongs.append("no worker held anything of the server that died: nothing was shown")
        return wrongs


def judge(
    verdict: Verdict,
    stories: Sequence[Story],
    reference: Mapping[int, Answer],
    entries: Iterable[Mapping[str, Any]],
) -> None:
    """Fill in what the stories and the log say."""
    entries = list(entries)
    attempts = attempts_of(entries)
    for story in stories:
        name = story.ask.name
        _compare(verdict, story, reference.get(story.ask.number))
        is_hit = attempts.get(name, 1) > 1 or bool(story.broken)
        verdict.hit += is_hit
        if story.ask.surface == "plain" or not story.arrivals:
            continue
        if not is_hit:
            verdict.calm_pauses_s.append(story.longest_silence_s)
        elif story.broken:
            verdict.pauses_s.append(story.arrivals[0] - story.broken[0].at)
        else:
            verdict.pauses_s.append(story.longest_silence_s)
    if verdict.fault == SERVER_KILL:
        verdict.freed_s = _times_to_free(verdict.injected, entries)
        verdict.noticed_s = _times_to_notice(verdict.injected, stories)


def _compare(verdict: Verdict, story: Story, expected: Answer | None) -> None:
    name = f"{story.ask.name} ({story.ask.surface})"
    if story.answer is None:
        verdict.failed.append(f"{name} failed: {story.failure}")
        return
    if expected is None:
        return
    if difference := story.answer.differs_from(expected):
        verdict.inexact.append(f"{name} differs in {difference}")
        return
    distance = story.answer.logprob_distance(expected)
    verdict.logprob_distance = max(verdict.logprob_distance, distance)
    for broken in story.broken:
        told = len(broken.token_ids)
        if broken.token_ids != expected.token_ids[:told] or not expected.text.startswith(
            broken.text
        ):
            verdict.inexact.append(f"{name} was going wrong before its connection broke")


def _times_to_free(
    injected: Sequence[Injected], entries: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return how long workers held what belonged to a server that died.

    That is whatever ended before the next server was there, and whatever nobody named any more.
    """
    returns = [
        seconds_of(e)
        for e in entries
        if e.get("event") == "process_ready" and e.get("name") == "server"
    ]
    times = []
    for entry in entries:
        if entry.get("event") != "attempt_ended":
            continue
        ended_at = seconds_of(entry)
        deaths = [fault.epoch_s for fault in injected if fault.epoch_s <= ended_at]
        if not deaths:
            continue
        is_back = any(deaths[-1] <= returned_at <= ended_at for returned_at in returns)
        if entry["reason"] == LEASE_EXPIRED or not is_back:
            times.append(ended_at - deaths[-1])
    return times


def _times_to_notice(injected: Sequence[Injected], stories: Sequence[Story]) -> list[float]:
    """Return how long clients took to learn that the server had died under their answer."""
    times = []
    for story in stories:
        for broken in story.broken:
            deaths = [fault.at for fault in injected if fault.at <= broken.at]
            if deaths and broken.had_begun:
                times.append(broken.at - deaths[-1])
    return times


def shown_ms(values: Sequence[float], percent: int) -> str:
    """Return a percentile in milliseconds, or a dash for no values."""
    return f"{1000 * percentile(values, percent):.0f}" if values else "-"
