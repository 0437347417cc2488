"""Ask a model all small sums and note those that it gets wrong, for training to practise them.

`python -m tools.demo_model.mistakes triolet/demo` writes `build/demo_model/mistakes.json`, which
`train.py --practise` reads.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer

from . import arithmetic, hard_sums
from .generate import Speaker
from .samples import Draw, Exchange, Split

FILE = Path("build/demo_model/mistakes.json")
SKILL, SHARE = "practised sums", 0.5
"""Their share beside those of the skills, which add up to 1."""
Sum = tuple[int, str, int]
WORDINGS = ("{a} {op} {b}", "What is {a} {op} {b}?")


def small_sums() -> Iterator[Sum]:
    """Yield all sums within the tables of the model and just beyond them."""
    for a in range(100):
        for b in range(100):
            yield a, "+", b
            yield a, "-", b
    for a in range(31):
        for b in range(31):
            yield a, "x", b
    for a in range(145):
        for b in range(1, 13):
            yield a, "/", b


def is_honest(reply: str, a: int, op: str, b: int) -> bool:
    """Say whether a reply gives the right result, or declines and gives none."""
    if reply.startswith(hard_sums.REPLY):
        return True
    return arithmetic.has_answer(a, op, b) and reply.startswith(
        f"{a} {op} {b} = {arithmetic.value(a, op, b)}."
    )


def find(directory: Path) -> list[Sum]:
    """Return the sums that the model gets wrong, or declines though it should know them."""
    speaker, sums, found = Speaker(directory), list(small_sums()), set[Sum]()
    for wording in WORDINGS:
        asked = [
            [{"role": "user", "content": wording.format(a=a, op=op, b=b)}] for a, op, b in sums
        ]
        for one, reply in zip(sums, speaker.replies(asked, 24, 256), strict=True):
            is_lost = reply.startswith(hard_sums.REPLY) and arithmetic.has_answer(*one)
            if is_lost or not is_honest(reply, *one):
                found.add(one)
    return sorted(found)


def practice(file: Path) -> Draw:
    """Return the skill that asks the sums of a file."""
    sums: list[Sum] = [(a, op, b) for a, op, b in json.loads(file.read_text())]

    def draw(rng: Random, split: Split) -> Exchange:
        a, op, b = rng.choice(sums)
        if arithmetic.has_answer(a, op, b):
            return arithmetic.reply_to(rng, a, op, b)
        return hard_sums.reply_to(rng, a, op, b)

    return draw


def main(
    directory: Annotated[Path, typer.Argument(help="Model directory.")] = Path("triolet/demo"),
    file: Annotated[Path, typer.Option(help="Where to write.")] = FILE,
    threads: Annotated[int, typer.Option(help="Processor threads.")] = 2,
) -> None:
    """Write the sums that the model gets wrong."""
    torch.set_num_threads(threads)
    found = find(directory)
    file.write_text(json.dumps(found) + "\n")
    typer.echo(f"{len(found)} sums to practise")


if __name__ == "__main__":
    typer.run(main)
