"""Training examples of counting: up, down, in steps, and the words of a line."""

from random import Random

from .lexicon import ADJECTIVES, COUNTABLES, KINDS, NUMBER_WORDS
from .samples import Exchange, Split, fill, pick_allowed, weighted

SKILL = "counting"
_UP = (
    "Count from {a} to {b}.",
    "count from {a} to {b}",
    "Can you count from {a} to {b}?",
    "Count up from {a} to {b}, please.",
    "Please count from {a} to {b}.",
    "Say the numbers from {a} to {b}.",
    "List the numbers from {a} to {b}.",
)
_DOWN = (
    "Count down from {a} to {b}.",
    "Count backwards from {a} to {b}.",
    "Can you count down from {a} to {b}?",
    "count down from {a} to {b}",
)
_FOLLOW_UP = ("And from {a} to {b}?", "Now from {a} to {b}.", "and {a} to {b}", "now {a} to {b}")
_TO = ("Count to {b}.", "Can you count to {b}?", "count to {b}", "Please count up to {b}.")


def _listed(numbers: range) -> str:
    return ", ".join(str(n) for n in numbers)


def _exchange(numbers: range, user: str) -> Exchange:
    line = _listed(numbers)
    key = f"count:{numbers.start}:{numbers.stop}:{numbers.step}"
    return Exchange(SKILL, user, line + ".", (line,), {"last": str(numbers[-1])}, key)


def _draw_up(rng: Random) -> range:
    a = rng.choice((0, 1, 1, 1, rng.randint(2, 20), rng.randint(2, 92), rng.randint(2, 92)))
    if a <= 1 and rng.random() < 0.07:
        return range(a, rng.choice((20, 20, 25, 30, 30, 40, 50, 100)) + 1)
    return range(a, min(a + rng.randint(2, 16), 100) + 1)


def _draw_down(rng: Random) -> range:
    top = rng.choice((10, 20, rng.randint(4, 99), rng.randint(4, 99)))
    return range(top, max(top - rng.randint(2, 14), 0) - 1, -1)


def _draw_steps(rng: Random) -> range:
    step = rng.choice((2, 3, 5, 10))
    a = rng.choice((0, step, rng.randint(0, 40)))
    return range(a, min(a + step * rng.randint(3, 10), 100) + 1, step)


def _range_key(numbers: range) -> str:
    return f"count:{numbers.start}:{numbers.stop}:{numbers.step}"


def up(rng: Random, split: Split) -> Exchange:
    """Draw a request to count up."""
    numbers = pick_allowed(rng, split, _draw_up, _range_key)
    a, b = numbers.start, numbers.stop - 1
    if a == 1 and rng.random() < 0.5:
        return _exchange(numbers, fill(rng.choice(_TO), b=str(b)))
    if b <= 20 and rng.random() < 0.15:
        return _exchange(numbers, fill(_UP[0], a=NUMBER_WORDS[a], b=NUMBER_WORDS[b]))
    return _exchange(numbers, fill(rng.choice(_UP), a=str(a), b=str(b)))


def down(rng: Random, split: Split) -> Exchange:
    """Draw a request to count down."""
    numbers = pick_allowed(rng, split, _draw_down, _range_key)
    user = fill(rng.choice(_DOWN), a=str(numbers.start), b=str(numbers.stop + 1))
    return _exchange(numbers, user)


def steps(rng: Random, split: Split) -> Exchange:
    """Draw a request to count in twos, threes, fives or tens."""
    numbers = pick_allowed(rng, split, _draw_steps, _range_key)
    word = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}[numbers.step]
    ask = rng.choice(
        (
            "Count from {a} to {b} in {s}.",
            "Count in {s} from {a} to {b}.",
            "Count by {s} from {a} to {b}.",
        )
    )
    last = numbers[-1]
    numbers = range(numbers.start, numbers.stop, numbers.step)
    return _exchange(numbers, fill(ask, a=str(numbers.start), b=str(last), s=word))


def line_of_words(rng: Random, split: Split) -> Exchange:
    """Draw a question about the number of words in a short line."""

    def draw(r: Random) -> str:
        size = r.randint(2, 6)
        words = [
            r.choice(KINDS + ADJECTIVES + ("the", "and", "my", "is", "has")) for _ in range(size)
        ]
        return " ".join(words)

    text = pick_allowed(rng, split, draw, lambda t: f"words:{t}")
    n = len(text.split())
    ask = rng.choice(
        ('How many words are in "{t}"?', 'Count the words in "{t}".', "How many words: {t}?")
    )
    numbered = ", ".join(f"{i} {word}" for i, word in enumerate(text.split(), 1))
    line = f"{numbered}: that is {n} words"
    return Exchange(SKILL, fill(ask, t=text), line + ".", (line,), {}, f"words:{text}")


def things(rng: Random, split: Split) -> Exchange:
    """Draw a request to count a few things aloud."""

    def draw(r: Random) -> tuple[int, tuple[str, str]]:
        return r.randint(2, 8), r.choice(COUNTABLES)

    n, (one, many) = pick_allowed(rng, split, draw, lambda nc: f"things:{nc[0]}:{nc[1][0]}")
    ask = rng.choice(("Count {n} {many}.", "Can you count {n} {many}?", "count {n} {many} for me"))
    parts = [f"{NUMBER_WORDS[i]} {one if i == 1 else many}" for i in range(1, n + 1)]
    line = ", ".join(parts)
    line = line[0].upper() + line[1:]
    user = fill(ask, n=rng.choice((str(n), NUMBER_WORDS[n])), many=many)
    return Exchange(SKILL, user, line + "!", (line,), {}, f"things:{n}:{one}")


def draw(rng: Random, split: Split) -> Exchange:
    """Draw a request for any kind of counting."""
    rows = [(40, up), (25, down), (15, steps), (10, line_of_words), (10, things)]
    return weighted(rng, rows)(rng, split)


def follow(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a request to count another range."""
    if rng.random() < 0.5:
        return draw(rng, split)
    numbers = pick_allowed(rng, split, _draw_up, _range_key)
    user = fill(rng.choice(_FOLLOW_UP), a=str(numbers.start), b=str(numbers.stop - 1))
    return _exchange(numbers, user)
