"""How long a newcomer will wait for its first token, and how far that is to be trusted.

Pure. The wait in the line is what is ahead by the rate at which the line moves: measured where
somebody waits, whatever holds it up, and before that guessed from what workers say of themselves.
What comes after is what is ahead on workers by their rate, and what has come on top lately. The
error of each prediction corrects the next ones, within bounds. Knows numbers; neither the line nor
workers.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from triolet.service_class import ServiceClass
from triolet.units import MILLISECONDS, SECONDS

MEMORY_S: Final = 15 * SECONDS
"""How far back the line's pace is measured: several generations long, so that a batch that ends all
at once does not look like speed, nor the time before it like a standstill."""
LEAST_PRIOR_S: Final = 1 * SECONDS
MOST_PRIOR_S: Final = 4 * SECONDS
"""Of waiting, after which the measured pace counts as much as what was guessed before: as long as a
row is held, within these bounds."""
ARRIVALS_S: Final = 5 * SECONDS
"""Over which is measured what higher classes bring."""
TRUST: Final = 0.05
"""How far one request moves what is believed of all: a score of them settle it."""
LEAST_BIAS: Final = 1 / 3
MOST_BIAS: Final = 3.0
"""Bounds of the correction: what is further off is no bias but another world, in which the pace has
to be measured anew."""
NOISE_S: Final = 50 * MILLISECONDS
"""Waits below this are chance, and say nothing of a bias."""
LEAST_SHARE: Final = 0.1
"""Of the rate that a class is always believed to have, whatever higher classes bring: they too are
bounded."""


class Capacity(NamedTuple):
    """What workers say of themselves.

    Attributes:
      rows: of decode, on workers that may be used.
      tokens_per_s: prompt tokens that all of them compute; 0 if nobody has said so.
      fastest_tokens_per_s: the same of the fastest of them, which is all that one prompt can have.
      foreign_tokens: prompt tokens that wait there and are not this server's.
    """

    rows: int = 0
    tokens_per_s: float = 0.0
    fastest_tokens_per_s: float = 0.0
    foreign_tokens: int = 0


class Fading:
    """A sum whose old parts fade.

    Args:
      memory_s: after which about a third is left.
      now: the time of the start.
    """

    def __init__(self, memory_s: float, now: float) -> None:
        self._memory_s = memory_s
        self._at = now
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add something."""
        self._sum = self.total(now) + amount

    def scale(self, share: float) -> None:
        """Take a share of all of it."""
        self._sum *= share

    def total(self, now: float) -> float:
        """Return what is left."""
        if now > self._at:
            self._sum *= math.exp(-(now - self._at) / self._memory_s)
            self._at = now
        return self._sum


class Prediction:
    """What one server has learnt.

    Args:
      now: the time of the start.

    Attributes:
      capacity: as of the last call of `see`.
      error_s: mean absolute error of predicted first tokens, of late.
      bias: by which the predicted waits of each class are corrected.
      running_tokens: prompt tokens of what left the line and has not ended.
      prompt_tokens: of the usual request; 0 before any ended well.
    """

    def __init__(self, now: float) -> None:
        self.capacity = Capacity()
        self.error_s = 0.0
        self.bias = [1.0] * len(ServiceClass)
        self.running_tokens = 0
        self._left = Fading(MEMORY_S, now)
        self._waited = Fading(MEMORY_S, now)
        self._is_waiting = False
        self._arrived = [Fading(ARRIVALS_S, now) for _ in ServiceClass]
        self._advanced_at = now
        self._served_s = 0.0
        self.prompt_tokens = 0.0
        self._rest_s = 0.0
        self._worker_bias = 1.0

    def advance(self, now: float, *, is_waiting: bool) -> None:
        """Let time pass. `is_waiting`: somebody was in the line since the last call, before workers
        that could take them."""
        elapsed_s, self._advanced_at = now - self._advanced_at, now
        self._is_waiting = is_waiting
        if is_waiting:
            self._waited.add(elapsed_s, now)

    def see(self, capacity: Capacity) -> None:
        """Take in what workers say; what was measured with more or fewer of them is scaled."""
        was, self.capacity = self.capacity, capacity
        shares = [
            new / old
            for new, old in (
                (float(capacity.rows), float(was.rows)),
                (capacity.tokens_per_s, was.tokens_per_s),
            )
            if old > 0.0 and new > 0.0
        ]
        # A rate that creeps is seen by the pace itself; a worker that goes takes a part of it.
        if shares and not 0.8 < min(shares) < 1.25:
            self._left.scale(min(shares))

    def arrived(self, service_class: ServiceClass, num_tokens: int, now: float) -> None:
        """Count what was taken on."""
        self._arrived[service_class].add(num_tokens, now)

    def left(self, num_tokens: int, now: float, *, is_limited: bool = False) -> None:
        """Count a sequence that waited and was dispatched. One that may have waited by a limit of
        its tenant's (`is_limited`) is part of the pace only while there is a line."""
        if self._is_waiting or not is_limited:
            self._left.add(num_tokens, now)

    def ended(self, served_s: float, num_tokens: int) -> None:
        """Learn from a sequence that ended well how long it had a row, and of its prompt."""
        self._served_s = _moved(self._served_s, served_s)
        self.prompt_tokens = _moved(self.prompt_tokens, float(num_tokens))

    def rate(self, now: float) -> float | None:
        """Return the tokens per second at which the line moves, or None if nothing is known."""
        guess = self._guessed_rate()
        waited_s, left = self._waited.total(now), self._left.total(now)
        if guess is None:
            if waited_s < LEAST_PRIOR_S:
                return None
            # Whatever runs will end and let as much in, so it counts as done now.
            return max(left + self.running_tokens, 1.0) / waited_s
        # A line that has not moved yet has not stood still: what it waits for may be a generation.
        prior_s = min(max(self._served_s, LEAST_PRIOR_S), MOST_PRIOR_S)
        return (left + guess * prior_s) / (waited_s + prior_s)

    def wait_s(self, service_class: ServiceClass, tokens_ahead: float, now: float) -> float | None:
        """Return how long a newcomer will be in the line, before any correction; None if that is
        not known."""
        if tokens_ahead <= 0.0:
            return 0.0
        rate = self.class_rate(service_class, now)
        return None if rate is None else tokens_ahead / rate

    def class_rate(self, service_class: ServiceClass, now: float) -> float | None:
        """Return the rate that higher classes leave."""
        rate = self.rate(now)
        if rate is None:
            return None
        return max(rate - self._higher_rate(service_class, now), LEAST_SHARE * rate, 1e-3)

    def corrected_s(self, service_class: ServiceClass, wait_s: float) -> float:
        """Return a wait with what was learnt of such predictions."""
        return wait_s * self.bias[service_class]

    def own_s(self, num_tokens: int) -> float:
        """Return how long a prompt computes by itself; 0 if no rate is known."""
        rate = self.capacity.fastest_tokens_per_s
        return num_tokens / rate if rate > 0.0 else 0.0

    def computing_s(self, service_class: ServiceClass, num_tokens: int, now: float) -> float:
        """Return how long workers compute so many prompt tokens, beside what goes before them."""
        rate = self.capacity.tokens_per_s
        if rate <= 0.0:
            return 0.0
        return num_tokens / max(rate - self._higher_rate(service_class, now), LEAST_SHARE * rate)

    def residence_s(self, service_class: ServiceClass, num_tokens: int, now: float) -> float:
        """Return the seconds from dispatch to a first token for which so much is computed."""
        computing_s = self.computing_s(service_class, num_tokens, now)
        return self._worker_bias * computing_s + self._rest_s

    def waited(self, service_class: ServiceClass, predicted_s: float, waited_s: float) -> None:
        """Learn from a sequence that left the line. `predicted_s` is what `wait_s` said."""
        if max(predicted_s, waited_s) < NOISE_S:
            return
        self.bias[service_class] = _bias(self.bias[service_class], predicted_s, waited_s)

    def resided(self, computing_s: float, resided_s: float) -> None:
        """Learn what comes on top of computing.

        Args:
          computing_s: what `own_s` said at dispatch of the prompt and all that was there before it.
          resided_s: from dispatch to the first token.
        """
        if computing_s < NOISE_S:
            rest_s = min(max(resided_s - computing_s, 0.0), SECONDS)
            self._rest_s += TRUST * (rest_s - self._rest_s)
        else:
            self._worker_bias = _bias(self._worker_bias, computing_s + self._rest_s, resided_s)

    def came(self, predicted_s: float, ttft_s: float) -> None:
        """Learn how far a predicted first token was off."""
        self.error_s += TRUST * (abs(ttft_s - predicted_s) - self.error_s)

    def _higher_rate(self, service_class: ServiceClass, now: float) -> float:
        """Return the tokens per second that higher classes bring."""
        return sum(one.total(now) for one in self._arrived[:service_class]) / ARRIVALS_S

    def _guessed_rate(self) -> float | None:
        """Return the rate that workers should have: of prefill, or of rows that become free, by
        Little's law, whichever is less."""
        rates = []
        if self.capacity.tokens_per_s > 0.0:
            rates.append(self.capacity.tokens_per_s)
        if self._served_s > 0.0 and self.capacity.rows:
            rates.append(self.capacity.rows / self._served_s * max(self.prompt_tokens, 1.0))
        return min(rates, default=None)


def _bias(believed: float, predicted_s: float, seen_s: float) -> float:
    """Return by what predictions are to be corrected, after another one that was not corrected."""
    seen = math.log((seen_s + NOISE_S) / (predicted_s + NOISE_S))
    was = math.log(believed)
    return min(max(math.exp(was + TRUST * (seen - was)), LEAST_BIAS), MOST_BIAS)


def _moved(believed: float, seen: float) -> float:
    return believed + TRUST * (seen - believed) if believed else seen
