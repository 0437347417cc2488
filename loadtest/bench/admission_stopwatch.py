"""A stopwatch around the steps of a request's way into the queue, while a benchmark runs.

Knows the names by which the product calls its steps, and puts a clock around each of them; the
steps themselves are the product's own. Knows neither who asks nor what is made of the times.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from server import app
from server.api import generate
from server.api.openai import completions
from server.scheduling.attempt import Attempts
from server.scheduling.request_table import RequestTable
from server.scheduling.requests import Requests

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

KEY, PARSE, SUBMIT, DISPATCH = "key", "parse", "submit", "dispatch, at once"
STEPS: Final = (KEY, "fields", "early", "request", "reserve", SUBMIT)
"""In their order. `PARSE` comes after the first, `DISPATCH` within the last: whoever has come may
have room on workers at once. Neither is a part of the way into the queue."""
TAKEN, LOOKED, SETTLED, SWEPT = "dispatch, each taken", "dispatch, nobody", "settle", "sweep"


@dataclass(slots=True)
class Lap:
    """One request's way.

    Attributes:
      began_ns: when its key was asked for.
      ended_ns: when it had its place, or its refusal; 0 before.
      steps: what each took, in nanoseconds.
      is_refused: it got no place.
    """

    began_ns: int
    ended_ns: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    is_refused: bool = False

    @property
    def whole_ns(self) -> int:
        """All of it, whatever stands between the steps included; but for reading the body, and for
        looking who may leave the queue."""
        others = self.steps.get(PARSE, 0) + self.steps.get(DISPATCH, 0)
        return self.ended_ns - self.began_ns - others


_LAP: Final[ContextVar[Lap | None]] = ContextVar("lap", default=None)


class Stopwatch:
    """What was timed.

    Attributes:
      laps: of requests that got a place or a refusal.
      taken_ns: of what no single request waits for, by name.
    """

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self.taken_ns: dict[str, list[float]] = {
            name: [] for name in (TAKEN, LOOKED, SETTLED, SWEPT)
        }

    def forget(self) -> None:
        """Begin anew: what came before was to get warm."""
        self.laps.clear()
        for taken in self.taken_ns.values():
            taken.clear()

    @contextmanager
    def running(self) -> Iterator[Stopwatch]:
        """Time whatever happens meanwhile in this process."""
        with ExitStack() as stack:

            def put(place: object, name: str, around: Callable[[Any], object]) -> None:
                step = getattr(place, name)
                stack.callback(setattr, place, name, step)
                setattr(place, name, around(step))

            put(app, "check_request", self._begun)
            put(completions, "read_fields", partial(self._async, PARSE))
            put(completions, "check_fields", partial(self._plain, "fields"))
            put(completions, "refuse_early", partial(self._plain, "early"))
            put(generate, "own_requests", partial(self._plain, "request"))
            put(generate, "reserved", partial(self._async, "reserve"))
            put(generate, "submit_all", partial(self._plain, SUBMIT))
            put(Attempts, "dispatch", self._dispatch)
            put(Requests, "sweep", partial(self._other, SWEPT))
            for end in ("finish", "fail"):
                put(RequestTable, end, partial(self._other, SETTLED))
            yield self

    def _begun(self, check: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        timed = self._async(KEY, check)

        async def begin(*args: Any) -> None:  # noqa: ANN401 (whatever the step takes)
            _LAP.set(Lap(perf_counter_ns()))
            await timed(*args)

        return begin

    def _plain(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:  # noqa: ANN401
            with self._timing(name):
                return step(*args, **more)

        return timed

    def _async(self, name: str, step: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def timed(*args: Any, **more: Any) -> Any:  # noqa: ANN401
            with self._timing(name):
                return await step(*args, **more)

        return timed

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        began_ns = perf_counter_ns()
        try:
            yield
        except Exception:
            self._note(name, began_ns, is_refused=True)
            raise
        self._note(name, began_ns)

    def _note(self, name: str, began_ns: int, *, is_refused: bool = False) -> None:
        now_ns, lap = perf_counter_ns(), _LAP.get()
        if lap is None or lap.ended_ns:
            return
        lap.steps[name] = now_ns - began_ns
        if name == SUBMIT:
            lap.steps[SUBMIT] -= lap.steps.get(DISPATCH, 0)
        if is_refused or name == SUBMIT:
            lap.ended_ns, lap.is_refused = now_ns, is_refused
            self.laps.append(lap)

    def _other(self, name: str, step: Callable[..., None]) -> Callable[..., None]:
        taken = self.taken_ns[name]

        def timed(*args: Any) -> None:  # noqa: ANN401
            began_ns = perf_counter_ns()
            step(*args)
            taken.append(perf_counter_ns() - began_ns)

        return timed

    def _dispatch(self, dispatch: Callable[..., None]) -> Callable[..., None]:
        def timed(attempts: Attempts, now: float) -> None:
            before, began_ns = len(attempts.line), perf_counter_ns()
            dispatch(attempts, now)
            took_ns, taken = perf_counter_ns() - began_ns, before - len(attempts.line)
            lap = _LAP.get()
            if lap is not None and not lap.ended_ns:
                lap.steps[DISPATCH] = took_ns
            if taken > 0:
                self.taken_ns[TAKEN].append(took_ns / taken)
            elif before:
                self.taken_ns[LOOKED].append(took_ns)

        return timed
