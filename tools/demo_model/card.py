"""Fill the model card from what training and measuring wrote: `python -m tools.demo_model.card`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .samples import HELD_OUT_PERCENT

_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# Triolet's demo model

A language model of {parameters} parameters that ships with Triolet and is served when no model is
named. It is here so that the server can be tried, tested and measured at once, on any machine,
without a download. It is small enough to be trained from nothing on two processor cores in an hour
or two, and it knows only what the generator in `tools/demo_model/` wrote for it.

## What it can do

- tell short stories with the name, hero, place, thing and plot that you ask for, and answer
  questions about the story that it told: *Tell me a story about a fox named Mia on the moon.*
- small sums: adding and taking away numbers of 0 to 99, times tables to 12 x 12 and about half of
  the divisions that undo them, comparing, halves and doubles, little word problems: *Tom has 5
  apples and gets 3 more. How many now?*
- answer questions about a built-in table of about 300 facts: capitals, planets, days and months,
  animals, colours, opposites; and ask you some: *Quiz me.*
- spell words, also words that nobody ever wrote, reverse them, and count their letters
- count up, down and in steps, to 100
- greet, remember the name that you tell it, take a name from the system prompt, tell a joke
- say kindly that it cannot do a thing, and what it can do instead
- follow a conversation: *another one*, *and of Italy?*, *now backwards*, *and plus 4?*

## What it cannot do

Copy a name that its training did not hold: a dragon named Ember gets another name.

Other sums, which it declines: numbers above 99, products beyond 12 x 12, divisions that leave a
remainder or are not in the tables, results below zero, fractions, powers, several operations. Ask
for 17 x 3, and it says *That sum is too hard for me.* Of 1,957 greedy questions on both sides of
these bounds, in 5 to 7 wordings, 12 got a wrong result (751 before the last training): divisions
such as 90 / 11, and *what is 13 times 7*. Inside the bounds 562 of 630 got the right one, and the
rest were declined.

Anything else. It has no knowledge beyond its table, no code, no translation, no advice, no
news; it speaks only English, and simply. It answers wrongly at times, and with full
confidence. It was never trained to handle harmful requests beyond declining what it does not
know. Do not use it for anything but trying Triolet.

## Held-out accuracy

Greedy decoding of the weights in this directory. {held_out} % of all combinations (word and task,
fact and wording, name with place and thing, topic and wording) are kept out of training by a
stable hash, and only those are asked here. Sums of two numbers are learned by heart instead, and
asked as training draws them. Half of the questions open a conversation; half come after up to
three other exchanges, with the typing noise of the training text (small letters, no full stop, a
slip now and then).

| skill | right | asked | accuracy |
|---|---|---|---|
{table}

A story is right if it mentions all that was asked for, shows the plot that was asked for, has at
least 40 words and ends by itself. All other replies are right if they hold the one right answer.
*Spelling*, *reversing* and *counting letters* ask about known words and invented ones alike.
The aim is 95 % for each; a skill below it wants more training, and loss was still falling when
this run ended. The numbers also lie in `accuracy.json`, as `evaluate.py` wrote them.

## Data and training

All text comes from `tools/demo_model/`: seeded templates and word lists, no outside text. Training
read {tokens} tokens in {steps} steps ({minutes:.0f} minutes of wall clock on
two shared processor cores, bfloat16 autocast): Muon for the matrices, AdamW for embeddings and
norms, a flat learning rate that falls linearly over the last part; the loss counts replies only.
These weights were trained in several stretches: first with a rate three times as high and batches
of 4,096 tokens, then with `--rows 4` to 15,036 steps, from there with more sums, those to be
declined among them, and at last with the sums that were still wrong. The shares of the kinds of
sums changed on the way; a fresh run will differ a little.

Llama architecture: {shape}.
The tokenizer is byte-level BPE with {vocab} tokens; digits stand alone. Conversations of training
are at most 512 tokens long; positions to 1,024 are allowed, but expect it to lose the thread beyond
about 500.

## Sampling

`generation_config.json` asks for temperature {temperature} and top-p {top_p}: stories vary, facts
hold. Temperature 0 is the most exact.

## Train and measure it again

```
python -m tools.demo_model.train --rows 4 --tokens 32784384
python -m tools.demo_model.train --rows 4 --tokens 36913152 --cooldown 0.08 --shares sums
python -m tools.demo_model.export
python -m tools.demo_model.evaluate triolet/demo --mistakes build/demo_model/mistakes.json
python -m tools.demo_model.train --rows 4 --tokens {tokens_plain} --cooldown 0.0487 \\
    --shares sums --practise build/demo_model/mistakes.json
python -m tools.demo_model.export
python -m tools.demo_model.evaluate triolet/demo --count 200
python -m tools.demo_model.card
```
"""


def card(directory: Path) -> str:
    """Return the card of a model directory."""
    accuracy = json.loads((directory / "accuracy.json").read_text())
    training = json.loads((directory / "training.json").read_text())
    config = json.loads((directory / "config.json").read_text())
    generation = json.loads((directory / "generation_config.json").read_text())
    rows = [
        f"| {skill} | {row['right']} | {row['asked']} | {row['accuracy']:.1%} |"
        for skill, row in accuracy.items()
    ]
    shape = (
        f"{config['num_hidden_layers']} layers, width {config['hidden_size']}, "
        f"{config['num_attention_heads']} query heads and {config['num_key_value_heads']} "
        f"key-value heads of {config['head_dim']}"
    )
    return _CARD.format(
        parameters=f"{training['parameters'] / 1e6:.1f} million",
        held_out=HELD_OUT_PERCENT,
        table="\n".join(rows),
        tokens=f"{training['tokens'] / 1e6:.1f} million",
        tokens_plain=training["tokens"],
        steps=f"{training['steps']:,}",
        minutes=training["minutes"],
        shape=shape,
        vocab=f"{config['vocab_size']:,}",
        temperature=generation["temperature"],
        top_p=generation["top_p"],
    )


def main(
    directory: Annotated[Path, typer.Option(help="Model directory.")] = Path("triolet/demo"),
) -> None:
    """Write the card."""
    (directory / "README.md").write_text(card(directory))


if __name__ == "__main__":
    typer.run(main)
