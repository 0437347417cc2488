"""Answers that their clients may come back to, by name, and when each of them is forgotten.

When room runs out, the owner with the most bytes, or with the most answers, loses its oldest
finished answer: no tenant pushes out the answers of one that holds less.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import trio

from triolet.errors import RequestError

from ..generation import CancelReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config_resume import ResumeConfig

    from .choices import Choices
    from .resumable import ResumableAnswer, ResumingReader


class Name(NamedTuple):
    """What an answer is found by.

    Attributes:
      owner: the tenant that pays with its own answers when room runs out; empty where there are no
        tenants, and all clients share one room then.
      scope: whose name it is; another client's are others.
      text: the client's word, or an id of ours.
    """

    owner: str
    scope: bytes
    text: str


class KeptAnswers:
    """All resumable answers of this process.

    Args:
      config: bounds.
      is_leaving: whether this process is to leave: then nothing goes on for nobody.
      count: told of what becomes of answers, by a word.
      sweeps: called with the time at each sweep: others who forget what is old.
    """

    def __init__(
        self,
        config: ResumeConfig,
        is_leaving: Callable[[], bool],
        count: Callable[[str], None],
        sweeps: Sequence[Callable[[float], None]] = (),
    ) -> None:
        self._config = config
        self._is_leaving = is_leaving
        self._count = count
        self._sweeps = sweeps
        self._answers: dict[Name, ResumableAnswer] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, name: Name, fingerprint: bytes | None = None) -> ResumableAnswer | None:
        """Return the answer of a name, or None if there is none.

        Raises:
          RequestError: 409, something else was asked for by that name.
        """
        self._forget_old(trio.current_time())
        answer = self._answers.get(name)
        if answer is not None and fingerprint not in (None, answer.fingerprint):
            self._count("conflict")
            raise RequestError(
                "another request was sent with this idempotency key; use a key for each",
                status=409,
                code="idempotency_conflict",
                param="idempotency-key",
            )
        return answer

    def begin(
        self,
        name: Name,
        answer: ResumableAnswer,
        submit: Callable[[ResumableAnswer], Choices],
    ) -> None:
        """Begin an answer and keep it, in the place of one of that name.

        Raises:
          RequestError: refused; nothing was begun or forgotten.
        """
        live = [other for other, one in self._answers.items() if one.ended_at is None]
        num_own = sum(other.owner == name.owner for other in live)
        most = self._config.max_live
        # Without tenants there is nobody to share with.
        most_own = max(1, int(most * self._config.owner_share)) if name.owner else most
        if len(live) >= most or num_own >= most_own:
            raise RequestError(
                f"{len(live)} resumable answers are under way, {num_own} of them yours",
                status=503,
                code="overloaded",
                param="idempotency-key",
                retry_after_s=1.0,
            )
        answer.start(submit(answer))
        self._answers.pop(name, None)
        self._answers[name] = answer
        self._make_room()
        self._count("begun")

    def join(self, answer: ResumableAnswer, position: int) -> ResumingReader:
        """Return a reader of an answer that is kept.

        Raises:
          RequestError: 400, it has not come so far; 410, that part is forgotten.
        """
        transcript = answer.transcript
        if position > transcript.end:
            raise RequestError(
                f"only {transcript.end} events were sent so far",
                status=400,
                code="invalid_request_error",
                param="last-event-id",
            )
        if position < transcript.first:
            self._count("forgotten")
            raise RequestError(
                f"events before {transcript.first} of this answer are not kept any more",
                status=410,
                code="resume_expired",
            )
        self._count("joined")
        return answer.read_from(position)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Give up what nobody comes back to, and forget what is old, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(self._config.sweep_s)
            self.sweep(trio.current_time())

    def sweep(self, now: float) -> None:
        """Look whether a time is over."""
        for answer in self._answers.values():
            grace_s = 0.0 if self._is_leaving() else answer.grace_s
            is_alone = answer.ended_at is None and answer.alone_since is not None
            if is_alone and now - (answer.alone_since or 0.0) >= grace_s:
                self._count("abandoned")
                answer.give_up(CancelReason.CLIENT_GONE)
        self._forget_old(now)
        self._make_room()
        for sweep in self._sweeps:
            sweep(now)

    def _forget_old(self, now: float) -> None:
        oldest = now - self._config.ttl_s
        self._answers = {
            name: answer
            for name, answer in self._answers.items()
            if answer.ended_at is None or answer.ended_at > oldest
        }

    def _make_room(self) -> None:
        """Forget finished answers until the rest fits."""
        self._evict(dict.fromkeys(self._answers, 1), self._config.max_kept)
        sizes = {
            name: answer.transcript.num_bytes
            for name, answer in self._answers.items()
            if answer.ended_at is not None
        }
        self._evict(sizes, self._config.max_kept_bytes)

    def _evict(self, weights: dict[Name, int], most: int) -> None:
        """Forget finished answers until all weights add up to no more than `most`.

        The owner with the most weight loses its oldest finished one each time, so that an owner
        with less than its equal part loses nothing.
        """
        total = sum(weights.values())
        if total <= most:
            return
        held: Counter[str] = Counter()
        finished: dict[str, deque[Name]] = {}
        for name, weight in weights.items():
            held[name.owner] += weight
            if self._answers[name].ended_at is not None:
                finished.setdefault(name.owner, deque()).append(name)
        while total > most and finished:
            owner = max(finished, key=held.__getitem__)
            name = finished[owner].popleft()
            if not finished[owner]:
                del finished[owner]
            held[owner] -= weights[name]
            total -= weights[name]
            del self._answers[name]
            self._count("evicted")
