"""The fault matrix: which fault in which phase must have which outcome. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from transport.frames import (
    Ended,
    FirstToken,
    Grant,
    KvChunk,
    KvCredit,
    KvDone,
    KvManifest,
    Prefill,
    Reserve,
    TokenCredit,
    Tokens,
)

from . import faults
from .client import Question, Surface
from .fleet import PREFILLS, SENDS_BYTES
from .matches import first_of_each, frames, payloads
from .outcomes import Outcome
from .phases import QUESTIONS, SHORT_PROMPT, Phase
from .rules import Fate, Way

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults import Injector


class Release(Enum):
    """When held frames and steps continue."""

    AT_ONCE = auto()  # as soon as the fault is in effect
    WHEN_FREE = auto()  # when the fault's consequences are over, so that held frames come late
    NEVER = auto()  # the injector takes care of it


class Bound(Enum):
    """The promise that a time must keep."""

    CANCEL = auto()
    OWNER = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault in one phase.

    Attributes:
      phase: phase in which the fault happens.
      fault: its name in the table.
      inject: the injector.
      outcome: expected outcome of both questions.
      question: what to ask.
      release: when the hold ends.
      bound: limit of the time until blocks are free.
      surfaces: the two clients' surfaces.
      hold: phase in which they are held until then, if earlier.
      prefill: the prefill worker that must get them.
    """

    phase: Phase
    fault: str
    inject: Injector
    outcome: Outcome
    question: Question
    release: Release = Release.AT_ONCE
    bound: Bound = Bound.OWNER
    surfaces: tuple[Surface, ...] = (Surface.SSE, Surface.WS)
    hold: Phase | None = None
    prefill: str = PREFILLS[0]

    @property
    def name(self) -> str:
        """Phase and fault."""
        return f"{self.phase.value}: {self.fault}"


ROLES: Final = ("server", "prefill", "decode")
PAIRS: Final = (("server", "decode"), ("server", "prefill"), ("prefill", "decode"))
KV_HAS_ARRIVED: Final = (Phase.DECODING, Phase.PAUSED, Phase.FINISHING)
CLIENT_LEAVES: Final = "client leaves"


def cells() -> Iterator[Cell]:
    """Yield the whole matrix."""
    for phase in Phase:
        yield from cancels(phase)
    for phase in Phase:
        yield from _silent_client(phase)
        yield from _deaths(phase)
        yield from _stops(phase)
        yield from _partitions(phase)
        yield from _repeats(phase)
    yield from _losses()
    yield from _half_open()
    yield from _inside()


def cancels(phase: Phase) -> Iterator[Cell]:
    """Yield the ways in which a client leaves."""
    question = QUESTIONS[phase]
    # A computing device is free when its step returns, so the step continues at once.
    release = Release.AT_ONCE if phase is Phase.PREFILLING else Release.WHEN_FREE
    for name, inject, surfaces in (
        ("RST", faults.RESET, tuple(Surface)),
        ("FIN", faults.CLOSE, tuple(Surface)),
        ("WS close", faults.say_close, (Surface.WS, Surface.WS)),
    ):
        yield Cell(
            phase,
            f"{CLIENT_LEAVES}: {name}",
            inject,
            Outcome.GONE,
            question,
            release,
            Bound.CANCEL,
            surfaces,
        )


def _silent_client(phase: Phase) -> Iterator[Cell]:
    if phase is Phase.FINISHING:
        return  # all remaining data fits into the socket, so this cannot be a fault
    question = replace(QUESTIONS[phase], max_tokens=250, top_logprobs=20)
    release = Release.NEVER if phase is Phase.PAUSED else Release.AT_ONCE
    yield Cell(
        phase,
        "client stops reading",
        faults.stop_reading,
        Outcome.STALLED,
        question,
        release,
        Bound.NONE,
    )


def _deaths(phase: Phase) -> Iterator[Cell]:
    for role in ROLES:
        outcome = Outcome.CUT if role == "server" else Outcome.EXACT
        yield Cell(phase, f"{role} SIGKILL", faults.kill(role), outcome, QUESTIONS[phase])


def _stops(phase: Phase) -> Iterator[Cell]:
    for role in ROLES:
        for kind, for_s in (("short", faults.SHORT_STOP_S), ("long", faults.LONG_STOP_S)):
            yield Cell(
                phase,
                f"{role} SIGSTOP {kind}",
                faults.freeze(role, for_s),
                Outcome.EXACT,
                QUESTIONS[phase],
                bound=Bound.NONE if kind == "short" else Bound.OWNER,
            )


def _partitions(phase: Phase) -> Iterator[Cell]:
    for one, other in PAIRS:
        if other == "decode" and one == "prefill" and phase in KV_HAS_ARRIVED:
            continue  # they do not communicate, so this cannot be a fault
        yield Cell(
            phase,
            f"partition {one}-{other}",
            faults.cut(one, other),
            Outcome.EXACT,
            QUESTIONS[phase],
        )


def _repeats(phase: Phase) -> Iterator[Cell]:
    for name, fate, matching in (
        ("every frame twice", Fate.DOUBLE, frames),
        # One of each kind: links keep their order, so more cannot occur.
        ("neighbours swapped", Fate.SWAP, first_of_each),
        ("every frame again, late", Fate.ECHO, frames),
    ):
        yield Cell(
            phase,
            name,
            faults.twist(fate, *faults.OF_ATTEMPTS, matching=matching),
            Outcome.EXACT,
            QUESTIONS[phase],
            bound=Bound.NONE,
        )


LOST: Final[tuple[tuple[Phase, type], ...]] = (
    (Phase.QUEUED, Reserve),
    (Phase.QUEUED, Grant),
    (Phase.RESERVED, Prefill),
    (Phase.PREFILLING, FirstToken),
    (Phase.PREFILLING, KvChunk),
    (Phase.TRANSFER, KvManifest),
    (Phase.TRANSFER, KvCredit),
    (Phase.TRANSFER, KvDone),
    (Phase.DECODING, Tokens),
    (Phase.DECODING, TokenCredit),
    (Phase.DECODING, Ended),
)


HELD_BEFORE: Final[dict[type, Phase]] = {Prefill: Phase.QUEUED, KvManifest: Phase.RESERVED}
"""Phases to hold instead if the phase's own hold is too late: the frame may have passed before the
fault. A manifest follows the last chunk sent, held or not."""


def _losses() -> Iterator[Cell]:
    """Yield each frame lost once, in the phase in which it is due."""
    for phase, kind in LOST:
        yield Cell(
            phase,
            f"one {kind.__name__} lost",
            faults.twist(Fate.DROP, kind, limit=1),
            Outcome.EXACT,
            QUESTIONS[phase],
            bound=Bound.NONE,
            hold=HELD_BEFORE.get(kind, phase),
        )
    for name, limit, outcome in (
        ("one chunk corrupt", 1, Outcome.EXACT),
        ("every chunk corrupt", None, Outcome.EXACT_OR_ERROR),
    ):
        yield Cell(
            Phase.TRANSFER,
            name,
            faults.twist(Fate.CORRUPT, KvChunk, limit=limit, matching=payloads),
            outcome,
            QUESTIONS[Phase.TRANSFER],
            bound=Bound.NONE,
            hold=Phase.RESERVED,
            prefill=SENDS_BYTES,
        )


HALF_OPEN: Final = (
    (Phase.DECODING, "server", "decode", Way.TO_WORKER),
    (Phase.DECODING, "server", "decode", Way.FROM_WORKER),
    (Phase.PREFILLING, "server", "prefill", Way.TO_WORKER),
    (Phase.PREFILLING, "server", "prefill", Way.FROM_WORKER),
    (Phase.TRANSFER, "prefill", "decode", Way.TO_WORKER),
    (Phase.TRANSFER, "prefill", "decode", Way.FROM_WORKER),
)


def _half_open() -> Iterator[Cell]:
    for phase, one, other, way in HALF_OPEN:
        from_to = f"{one} to {other}" if way is Way.TO_WORKER else f"{other} to {one}"
        yield Cell(
            phase,
            f"silence {from_to}",
            faults.cut(one, other, way),
            Outcome.EXACT,
            QUESTIONS[phase],
        )


def _inside() -> Iterator[Cell]:
    """Yield faults inside a process."""
    for phase, hold, role in (
        (Phase.PREFILLING, Phase.RESERVED, "prefill"),
        (Phase.DECODING, None, "decode"),
    ):
        question = QUESTIONS[phase]
        yield Cell(
            phase,
            "exception in a step",
            faults.gate(role, "raise 1", 0.0),
            Outcome.EXACT,
            question,
            Release.NEVER,
            Bound.NONE,
            hold=hold,
        )
        yield Cell(
            phase,
            "poisoned device",
            faults.poison(role),
            Outcome.EXACT,
            question,
            Release.NEVER,
            Bound.NONE,
            hold=hold,
        )
        yield Cell(
            phase,
            "wedged device",
            faults.gate(role, "hold 1", faults.WEDGE_S),
            Outcome.EXACT,
            question,
            Release.NEVER,
            hold=hold,
        )
    yield Cell(
        Phase.DECODING,
        "KV pool exhausted",
        faults.exhaust_pool,
        Outcome.EXACT,
        Question(SHORT_PROMPT, max_tokens=960, seed=18),
        bound=Bound.NONE,
    )
    yield Cell(
        Phase.DECODING,
        "server out of files",
        faults.exhaust_files,
        Outcome.EXACT,
        QUESTIONS[Phase.DECODING],
        bound=Bound.NONE,
    )
