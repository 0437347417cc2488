"""Training examples of small sums: the four operations, comparisons, and short word problems.

The model memorises the results of sums of two numbers, so none of these are held out of training.
Some comparisons, doubles, halves and sums of three numbers are held out.
"""

from random import Random

from .lexicon import BOYS, COUNTABLES, GIRLS, NUMBER_WORDS
from .samples import Exchange, Split, fill, pick_allowed, weighted

SKILL = "arithmetic"
_ASK = (
    "{a}{op}{b}",
    "{a} {op} {b}",
    "{a} {op} {b} =",
    "{a} {op} {b} = ?",
    "{a}{op}{b}=?",
    "What is {a} {op} {b}?",
    "What is {a} {op} {b}?",
    "what's {a} {op} {b}?",
    "How much is {a} {op} {b}?",
    "Can you work out {a} {op} {b}?",
    "Calculate {a} {op} {b}.",
    "Please solve {a} {op} {b}.",
    "Compute {a} {op} {b}",
)
_SYMBOLS = {
    "+": ("+", "+", "+", "plus", "plus"),
    "-": ("-", "-", "-", "minus", "minus"),
    "x": ("x", "x", "*", "*", "times", "times", "multiplied by"),
    "/": ("/", "/", "divided by", "divided by", "÷"),
}
_SPOKEN = {"+": "plus", "-": "minus", "x": "times", "/": "divided by"}
_ASK_SPECIAL = {
    "+": (
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Add {b} to {a}.",
        "add {a} to {b}",
    ),
    "-": ("Take {b} away from {a}.", "Subtract {b} from {a}.", "What is {a} take away {b}?"),
    "x": ("Multiply {a} by {b}.", "What is the product of {a} and {b}?", "multiply {a} and {b}"),
    "/": ("Divide {a} by {b}.", "Share {a} between {b}."),
}
_FOLLOW = (
    "And {a} {op} {b}?",
    "and {a} {op} {b}",
    "Now {a} {op} {b}.",
    "What about {a} {op} {b}?",
    "ok, {a} {op} {b}?",
    "{a} {op} {b}?",
)
_AFTER = ("", "", "", "", "", "", " Do you have another one?", " That was a nice one.")
_MORE = {
    "+": (
        "{who} has {a} {things} and gets {b} more.",
        "{who} finds {a} {things} and then {b} more.",
    ),
    "-": ("{who} has {a} {things} and gives away {b}.", "{who} has {a} {things} and loses {b}."),
    "x": ("{who} has {a} boxes with {b} {things} in each.",),
}


def value(a: int, op: str, b: int) -> int:
    """Return the correct result."""
    return {"+": a + b, "-": a - b, "x": a * b, "/": a // b if b else 0}[op]


def sum_key(a: int, op: str, b: int) -> str:
    """Return the key of a sum. `a + b` and `b + a` have the same key; products do not."""
    if op == "+":
        a, b = min(a, b), max(a, b)
    return f"sum:{a}{op}{b}"


def _draw_sum(rng: Random) -> tuple[int, str, int]:
    op = rng.choices("+-x/", (28, 34, 14, 24))[0]
    if op == "x":
        return rng.randint(0, 12), op, rng.randint(0, 12)
    if op == "/":
        b = rng.randint(1, 12)
        return b * rng.randint(0, 12), op, b
    high = rng.choice((10, 20, 99, 99, 99))
    a, b = rng.randint(0, high), rng.randint(0, high)
    if op == "-" and a < b:
        a, b = b, a
    return a, op, b


def has_answer(a: int, op: str, b: int) -> bool:
    """Return whether the model should know the result. It declines all other sums."""
    if op == "x":
        return max(a, b) <= 12
    if op == "/":
        return 1 <= b <= 12 and a % b == 0 and a // b <= 12
    return max(a, b) <= 99 and (op == "+" or a >= b)


def _reply(rng: Random, a: int, op: str, b: int, user: str) -> Exchange:
    line = f"{a} {op} {b} = {value(a, op, b)}"
    memo = {"value": str(value(a, op, b))}
    return Exchange(SKILL, user, f"{line}.{rng.choice(_AFTER)}", (line,), memo, sum_key(a, op, b))


def ask(rng: Random, a: int, op: str, b: int) -> str:
    """Return a question for a sum."""
    first, second = str(a), str(b)
    if max(a, b) <= 20 and rng.random() < 0.12:
        first, second = NUMBER_WORDS[a], NUMBER_WORDS[b]
        return fill("What is {a} {op} {b}?", a=first, op=_SPOKEN[op], b=second)
    if rng.random() < 0.2:
        return fill(rng.choice(_ASK_SPECIAL[op]), a=first, b=second)
    sign = rng.choice(_SYMBOLS[op])
    forms = _ASK if len(sign) == 1 else [t for t in _ASK if "{a}{op}" not in t]
    return fill(rng.choice(forms), a=first, op=sign, b=second)


def follow_up(rng: Random, a: int, op: str, b: int) -> str:
    """Return a question for a sum that follows another one."""
    return fill(rng.choice(_FOLLOW), a=str(a), op=rng.choice(_SYMBOLS[op]), b=str(b))


def plain(rng: Random, split: Split) -> Exchange:
    """Draw a question about one sum."""
    return reply_to(rng, *_draw_sum(rng))


def reply_to(rng: Random, a: int, op: str, b: int) -> Exchange:
    """Draw a question about the given sum."""
    return _reply(rng, a, op, b, ask(rng, a, op, b))


def story_problem(rng: Random, split: Split) -> Exchange:
    """Draw a word problem."""
    while True:
        a, op, b = _draw_sum(rng)
        if op in _MORE and value(a, op, b) >= 0 and min(a, b) > 1:
            break
    user, who, things = tell(rng, a, op, b)
    line = f"{a} {op} {b} = {value(a, op, b)}"
    reply = f"{line}. {who} has {value(a, op, b)} {things}."
    return Exchange(SKILL, user, reply, (line,), {"value": str(value(a, op, b))}, sum_key(a, op, b))


def tell(rng: Random, a: int, op: str, b: int) -> tuple[str, str, str]:
    """Return a word problem for a sum that is no division, with its person and things."""
    who, (_, things) = rng.choice(GIRLS + BOYS), rng.choice(COUNTABLES)
    told = rng.choice(_MORE[op])
    question = rng.choice(
        ("How many {things} does {who} have now?", "How many {things} is that?", "How many now?")
    )
    user = fill(f"{told} {question}", who=who, a=str(a), b=str(b), things=things)
    return user, who, things


def compare(rng: Random, split: Split) -> Exchange:
    """Draw a question about the bigger or smaller of two numbers."""

    def draw(r: Random) -> tuple[int, int]:
        a, b = r.sample(range(100), 2)
        return a, b

    a, b = pick_allowed(rng, split, draw, lambda ab: f"compare:{ab[0]}:{ab[1]}")
    big = rng.random() < 0.6
    word = rng.choice(("bigger", "larger", "greater") if big else ("smaller", "less"))
    user = fill(
        rng.choice(
            (
                "Which is {w}, {a} or {b}?",
                "Which number is {w}: {a} or {b}?",
                "{a} or {b}, which is {w}?",
            )
        ),
        w=word,
        a=str(a),
        b=str(b),
    )
    best = max(a, b) if big else min(a, b)
    line = f"{best} is {'bigger' if big else 'smaller'} than {a + b - best}"
    return Exchange(SKILL, user, line + ".", (line,), {}, f"compare:{a}:{b}")


def neighbour(rng: Random, split: Split) -> Exchange:
    """Draw a question about the next or previous number, double or half, or even and odd."""

    def draw(r: Random) -> tuple[str, int]:
        return r.choice(("after", "before", "double", "half", "even")), r.randint(1, 99)

    asks: tuple[str, ...]
    kind, n = pick_allowed(rng, split, draw, lambda kn: f"near:{kn[0]}:{kn[1]}")
    key = f"near:{kind}:{n}"
    if kind == "half":
        n = n - n % 2 or 2
    if kind in ("after", "before"):
        asks = (f"What number comes {kind} {{n}}?", f"Which number is {kind} {{n}}?")
        line = f"{n + 1 if kind == 'after' else n - 1} comes {kind} {n}"
    elif kind == "double":
        asks = ("Double {n}.", "What is double {n}?", "What is twice {n}?")
        line = f"Double {n} is {2 * n}"
    elif kind == "half":
        asks = ("What is half of {n}?", "Halve {n}.")
        line = f"Half of {n} is {n // 2}"
    else:
        asks = ("Is {n} even or odd?", "Is {n} odd or even?", "Is {n} an even number?")
        line = f"{n} is {'odd' if n % 2 else 'even'}"
    return Exchange(SKILL, fill(rng.choice(asks), n=str(n)), line + ".", (line,), {}, key)


def three(rng: Random, split: Split) -> Exchange:
    """Draw a question about a sum of three small numbers."""

    def drawn(r: Random) -> tuple[int, int, int]:
        return r.randint(0, 20), r.randint(0, 20), r.randint(0, 10)

    a, b, c = pick_allowed(rng, split, drawn, lambda d: f"three:{sorted(d)}")
    ask = rng.choice(
        ("{a} + {b} + {c}", "What is {a} + {b} + {c}?", "{a}+{b}+{c}", "{a} plus {b} plus {c}")
    )
    line = f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}"
    key, memo = f"three:{sorted((a, b, c))}", {"value": str(a + b + c)}
    return Exchange(SKILL, fill(ask, a=str(a), b=str(b), c=str(c)), line + ".", (line,), memo, key)


def by_zero(rng: Random, split: Split) -> Exchange:
    """Draw a question about a division by zero."""
    a = pick_allowed(rng, split, lambda r: r.randint(1, 99), lambda a: f"zero:{a}")
    line = "Nobody can divide by zero"
    return Exchange(SKILL, ask(rng, a, "/", 0), line + ".", (line,), {}, f"zero:{a}")


def draw(rng: Random, split: Split) -> Exchange:
    """Draw a question about any kind of sum."""
    rows = [
        (68, plain),
        (14, story_problem),
        (6, compare),
        (6, neighbour),
        (3, three),
        (1, by_zero),
    ]
    return weighted(rng, rows)(rng, split)


def follow(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a follow-up question, sometimes about the last result."""
    last = previous.memo.get("value", "")
    if last.isdigit() and int(last) < 90 and rng.random() < 0.3:
        a = int(last)
        op = rng.choice("+-")
        b = rng.randint(0, 9 if op == "+" else min(a, 9))
        word = {
            "+": ("plus {b}?", "and plus {b}?", "Now add {b}."),
            "-": ("minus {b}?", "and minus {b}?", "Now take away {b}."),
        }
        return _reply(rng, a, op, b, fill(rng.choice(word[op]), b=str(b)))
    a, op, b = _draw_sum(rng)
    return _reply(rng, a, op, b, follow_up(rng, a, op, b))
