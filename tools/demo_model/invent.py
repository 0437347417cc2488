"""Invent words and names, from which the model learns to copy and spell unknown words."""

from random import Random

from .lexicon import BOYS, GIRLS

_ONSETS = (
    "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr kn ph pl pr qu sc sh sk sl "
    "sm sn sp st str sw th tr tw wh y"
).split()
_VOWELS = "a a a e e e i i o o u ai ea ee ie oa oo ou y".split()
_CODAS = (
    "b ck d ft g l ld ll m mp n nd ng nt p r rd rk rt s sh ss st t th x zz lt ct le ly er ing tion"
).split()


def invented_word(rng: Random) -> str:
    """Make a word of one to three syllables, or sometimes of random letters."""
    if rng.random() < 0.15:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7)))
    word = ""
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
        word += rng.choice(_ONSETS) if rng.random() < 0.85 or not word else ""
        word += rng.choice(_VOWELS)
        word += rng.choice(_CODAS) if rng.random() < 0.5 else ""
    return word[:11] if len(word) > 1 else word + rng.choice(_CODAS)


def any_name(rng: Random, invented_share: float = 0.3) -> str:
    """Draw a first name, mostly a known one."""
    if rng.random() < invented_share:
        return invented_word(rng).capitalize()
    return rng.choice(GIRLS + BOYS)
