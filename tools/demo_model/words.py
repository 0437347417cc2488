"""Training examples that spell, reverse and count the letters of known and invented words.

A word consists of a few tokens, so the model has to learn the letters of each token. Replies
therefore begin with the letters.
"""

from random import Random

from .invent import invented_word
from .lexicon import NUMBER_WORDS, WORDS
from .samples import Exchange, Split, allowed, fill, pick_allowed, weighted

SPELLING, REVERSING, LETTERS = "spelling", "reversing", "counting letters"
_SPELL = (
    "Spell {w}.",
    "Spell the word {w}.",
    "How do you spell {w}?",
    "Can you spell {w}?",
    "Can you spell {w} for me, please?",
    "spell {w}",
    'Spell "{w}"',
    "How is {w} spelled?",
    "What are the letters in {w}?",
    "Write {w} letter by letter.",
)
_REVERSE = (
    "Reverse {w}.",
    "Reverse the word {w}.",
    "What is {w} backwards?",
    "Spell {w} backwards.",
    "Can you reverse {w}?",
    "Say {w} backwards.",
    "reverse {w}",
    'Reverse "{w}"',
    "Write {w} backwards, please.",
    "How do you spell {w} backwards?",
)
_LETTERS = (
    "How many letters are in {w}?",
    "How many letters does {w} have?",
    "Count the letters in {w}.",
    "how many letters in {w}",
    "How long is the word {w}?",
    'How many letters are in the word "{w}"?',
)
_ONE_LETTER = (
    "How many times is the letter {c} in {w}?",
    "How many {c}'s are in {w}?",
    "Count the letter {c} in {w}.",
    "how many {c} in {w}",
    "How many letters {c} does {w} have?",
)
_ENDS = {
    "first": ("What is the first letter of {w}?", "What letter does {w} start with?"),
    "last": ("What is the last letter of {w}?", "What letter does {w} end with?"),
}
_FOLLOW: dict[str, tuple[str, ...]] = {
    SPELLING: ("And {w}?", "Now {w}.", "What about {w}?", "and {w}", "Now spell {w}."),
    REVERSING: ("And {w}?", "Now {w}.", "What about {w}?", "and {w}", "Now reverse {w}."),
    LETTERS: ("And in {w}?", "And {w}?", "What about {w}?", "and {w}"),
}
_SAME = {
    SPELLING: ("Spell it.", "Can you spell it?", "How do you spell that?"),
    REVERSING: ("And backwards?", "Now reverse it.", "Now backwards, please.", "and backwards"),
    LETTERS: ("How many letters is that?", "How many letters does it have?", "how many letters"),
}


def _letters(word: str) -> str:
    return "-".join(word)


def _any_word(rng: Random) -> str:
    return invented_word(rng) if rng.random() < 0.3 else rng.choice(WORDS)


def key_of(skill: str, word: str) -> str:
    """Return the key of a skill and a word."""
    return f"{skill}:{word}"


def word_for(rng: Random, split: Split, skill: str) -> str:
    """Draw a word that this part of the split allows for the skill."""
    return pick_allowed(rng, split, _any_word, lambda w: key_of(skill, w))


def spelled(word: str, user: str) -> Exchange:
    """Return an exchange with the letters as the reply. The reply does not repeat the word first:
    the model copies unknown words worse than it spells them, and would spell its copy."""
    line = _letters(word)
    return Exchange(SPELLING, user, line + ".", (line,), {"word": word}, key_of(SPELLING, word))


def reversed_(word: str, user: str) -> Exchange:
    """Return an exchange with the letters and the reversed letters as the reply."""
    back = _letters(word[::-1])
    reply = f"{_letters(word)} backwards is {back}."
    return Exchange(
        REVERSING, user, reply, (f"backwards is {back}",), {"word": word}, key_of(REVERSING, word)
    )


def counted(word: str, user: str) -> Exchange:
    """Return an exchange with the letters and their number as the reply."""
    n = len(word)
    line = f"{_letters(word)}: that is {n} letter{'s' if n > 1 else ''}"
    return Exchange(LETTERS, user, line + ".", (line,), {"word": word}, key_of(LETTERS, word))


_REPLIES = {SPELLING: spelled, REVERSING: reversed_, LETTERS: counted}


def _plain(rng: Random, split: Split, skill: str, asks: tuple[str, ...]) -> Exchange:
    word = word_for(rng, split, skill)
    shown = word.capitalize() if rng.random() < 0.08 else word
    return _REPLIES[skill](word, fill(rng.choice(asks), w=shown))


def spell(rng: Random, split: Split) -> Exchange:
    """Draw a request to spell a word."""
    return _plain(rng, split, SPELLING, _SPELL)


def reverse(rng: Random, split: Split) -> Exchange:
    """Draw a request to reverse a word."""
    return _plain(rng, split, REVERSING, _REVERSE)


def one_letter(rng: Random, split: Split) -> Exchange:
    """Draw a question about how often a letter occurs."""
    word = word_for(rng, split, LETTERS)
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    n = word.count(letter)
    times = "once" if n == 1 else "not there" if n == 0 else f"{NUMBER_WORDS[n]} times"
    line = f"{_letters(word)}: the letter {letter} is {'there ' if n else ''}{times}"
    user = fill(rng.choice(_ONE_LETTER), c=letter, w=word)
    return Exchange(LETTERS, user, line + ".", (line,), {"word": word}, key_of(LETTERS, word))


def end_letter(rng: Random, split: Split) -> Exchange:
    """Draw a question about the first or the last letter."""
    word = word_for(rng, split, LETTERS)
    which = rng.choice(("first", "last"))
    letter = word[0] if which == "first" else word[-1]
    line = f"{_letters(word)}: the {which} letter is {letter}"
    user = fill(rng.choice(_ENDS[which]), w=word)
    return Exchange(LETTERS, user, line + ".", (line,), {"word": word}, key_of(LETTERS, word))


def letters(rng: Random, split: Split) -> Exchange:
    """Draw any question about letters."""
    if rng.random() < 0.6:
        return _plain(rng, split, LETTERS, _LETTERS)
    return weighted(rng, [(0.6, one_letter), (0.4, end_letter)])(rng, split)


def follow(rng: Random, previous: Exchange, split: Split) -> Exchange:
    """Draw a question about another word, or another question about the same word."""
    if rng.random() < 0.45:
        word = previous.memo["word"]
        skill = rng.choice([s for s in _SAME if s != previous.skill])
        if allowed(key_of(skill, word), split):
            return _REPLIES[skill](word, rng.choice(_SAME[skill]))
    skill = previous.skill
    if skill == LETTERS and "that is" not in previous.reply:
        return letters(rng, split)
    return _plain(rng, split, skill, _FOLLOW[skill])
