"""Training examples about the table of facts: questions in both directions, and quizzes."""

from random import Random

from .fact_table import LISTS, RELATIONS, Relation
from .samples import Exchange, Split, allowed, article, capital, fill, pick_allowed

SKILL, QUIZ = "facts", "quiz"
_Question = tuple[Relation, tuple[str, str], str, bool]


def _fix_articles(text: str, subject: str) -> str:
    if article(subject).startswith("an "):
        text = text.replace(f"a {subject}", f"an {subject}").replace(
            f"A {subject}", f"An {subject}"
        )
    return text


def _question(rng: Random) -> _Question:
    weights = [len(r.rows) * (1.6 if r.back_asks else 1.0) + 4 for r in RELATIONS]
    relation = rng.choices(RELATIONS, weights)[0]
    row = rng.choice(relation.rows)
    is_back = bool(relation.back_asks) and rng.random() < 0.35
    return relation, row, rng.choice(relation.back_asks if is_back else relation.asks), is_back


def _key(question: _Question) -> str:
    relation, (subject, _), template, _ = question
    return f"fact:{relation.name}:{subject}:{template}"


def _exchange(question: _Question) -> Exchange:
    relation, (subject, obj), template, is_back = question
    answer = relation.back_answer if is_back else relation.answer
    line = capital(_fix_articles(_fix_articles(answer.format(s=subject, o=obj), subject), obj))
    user = fill(template, s=subject, o=obj)
    if article(subject).startswith("an "):
        user = user.replace("a \x01" + subject, "an \x01" + subject)
    if article(obj).startswith("an "):
        user = user.replace("a \x01" + obj, "an \x01" + obj).replace(
            "A \x01" + obj, "An \x01" + obj
        )
    memo = {} if is_back else {"relation": relation.name}
    return Exchange(SKILL, user, line, (line.rstrip("."),), memo, _key(question))


def _list(rng: Random) -> Exchange:
    asks, listed = rng.choice(LISTS)
    return Exchange(SKILL, rng.choice(asks), capital(listed) + ".", (capital(listed),))


_TELL = (
    "Tell me a fact.",
    "Do you know a fact?",
    "Teach me something.",
    "tell me something interesting",
    "A fact, please.",
    "Another fact.",
)
_QUIZ = (
    "Quiz me.",
    "Quiz me!",
    "Ask me a question.",
    "Ask me something.",
    "Let us play a quiz.",
    "quiz",
    "Another question.",
    "Test me.",
    "Next question.",
)
_RIGHT = ("That is right!", "Yes, well done!", "Correct!")
_WRONG = ("Not quite.", "Nearly, but no.", "No, sorry.")
_QUIZZED = (
    "capital",
    "baby",
    "colour",
    "opposite",
    "next day",
    "next month",
    "planet",
    "sound",
    "legs",
)


def told(rng: Random, split: Split) -> Exchange:
    """Draw a request for any fact."""
    fact = draw(rng, split)
    user = rng.choice(_TELL)
    return Exchange(SKILL, user, f"Did you know? {fact.reply}", ("Did you know",))


def quiz(rng: Random, split: Split) -> Exchange:
    """Draw a request for a quiz question."""

    def drawn(r: Random) -> tuple[Relation, tuple[str, str]]:
        relation = r.choice([r for r in RELATIONS if r.name in _QUIZZED])
        return relation, r.choice(relation.rows)

    def key(question: tuple[Relation, tuple[str, str]]) -> str:
        return f"quiz:{question[0].name}:{question[1][0]}"

    relation, (subject, obj) = pick_allowed(rng, split, drawn, key)
    asked = _fix_articles(relation.asks[0].format(s=subject), subject)
    line = capital(
        _fix_articles(_fix_articles(relation.answer.format(s=subject, o=obj), subject), obj)
    )
    memo = {"quiz": line, "answer": obj, "wrong": rng.choice(relation.rows)[1]}
    return Exchange(QUIZ, rng.choice(_QUIZ), asked, ("?",), memo, f"quiz:{relation.name}:{subject}")


def guess(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a correct or wrong answer to the model's quiz question."""
    answer, line = previous.memo["answer"], previous.memo["quiz"]
    said = answer if rng.random() < 0.6 else previous.memo["wrong"]
    verdict = rng.choice(_RIGHT if said == answer else _WRONG)
    if said != answer and rng.random() < 0.25:
        said, verdict = rng.choice(("I don't know.", "no idea", "Tell me.", "I give up.")), ""
    if said in (answer, previous.memo["wrong"]) and rng.random() < 0.3:
        said = rng.choice(("It is {0}.", "{0}!", "Is it {0}?", "{0}, I think.")).format(said)
    reply = f"{verdict} {line}".strip()
    return Exchange(QUIZ, capital(said), reply, (line.rstrip("."),), {}, previous.key)


def draw(rng: Random, split: Split) -> Exchange:
    """Draw a question about a fact."""
    if split is Split.TRAIN and rng.random() < 0.02:
        return told(rng, split)
    if split is Split.TRAIN and rng.random() < 0.05:
        return _list(rng)
    return _exchange(pick_allowed(rng, split, _question, _key))


def follow(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a short follow-up question about another subject."""
    name = previous.memo.get("relation", "")
    relation = next((r for r in RELATIONS if r.name == name), None)
    if relation is None:
        return draw(rng, split)

    def question(r: Random) -> _Question:
        return relation, r.choice(relation.rows), r.choice(relation.follows), False

    for _ in range(20):
        drawn = question(rng)
        if allowed(_key(drawn), split):
            return _exchange(drawn)
    return draw(rng, split)
