"""`python -m tools.demo_model.card`: write the demo model's README.md from its JSON files."""

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

A language model of {parameters} parameters that ships with Triolet and is served by default. You
can try, test and measure the server with it immediately, on any machine, without a download. It is
small enough to be trained from scratch on two CPU cores in an hour or two, and it knows only the
texts of the generator in `tools/demo_model/`.

## What it can do

- tell short stories with the name, hero, place, thing and plot that you ask for, and answer
  questions about its last story: *Tell me a story about a fox named Mia on the moon.*
- do small sums: addition and subtraction of numbers from 0 to 99, times tables to 12 x 12 and about
  half of the corresponding divisions, comparisons, halves and doubles, short word problems: *Tom
  has 5 apples and gets 3 more. How many now?*
- answer questions about a table of about 300 facts: capitals, planets, days and months, animals,
  colours, opposites; and ask you some: *Quiz me.*
- spell words, including invented ones, reverse them, and count their letters
- count up, down and in steps, to 100
- greet you, remember your name, take a name from the system prompt, tell a joke
- decline politely, and tell you what it can do instead
- follow a conversation: *another one*, *and of Italy?*, *now backwards*, *and plus 4?*

## What it cannot do

It cannot copy a name that did not occur in training: a dragon named Ember gets another name.

It declines other sums: numbers above 99, products beyond 12 x 12, divisions with a remainder or
outside the tables, negative results, fractions, powers, several operations. Ask for 17 x 3, and it
says *That sum is too hard for me.* Of 1,957 greedy questions inside and outside these limits, in 5
to 7 wordings, 12 got a wrong result (751 before the last training): divisions such as 90 / 11, and
*what is 13 times 7*. Inside the limits 562 of 630 got the correct result, and the rest were
declined.

It cannot do anything else. It has no knowledge beyond its table, no code, no translation, no
advice, no news. It speaks only simple English. Some answers are wrong, and stated with full
confidence. It was not trained to handle harmful requests, except by declining what it does not
know. Use it only to try Triolet.

## Held-out accuracy

Measured with greedy decoding of the weights in this directory. A stable hash holds {held_out} % of
all combinations (word and task, fact and wording, name with place and thing, topic and wording) out
of training, and only those are measured here. Sums of two numbers are memorised instead, and are
drawn as in training. Half of the questions open a conversation; the others come after up to three
exchanges, with the typing noise of the training text (lower case, no full stop, occasional typos).

| skill | correct | questions | accuracy |
|---|---|---|---|
{table}

A story is correct if it mentions everything in the request, has the requested plot and at least 40
words, and ends by itself. Other replies are correct if they contain the answer. *Spelling*,
*reversing* and *counting letters* use known and invented words. The goal is 95 % for each; a skill
below it needs more training, and the loss was still falling when this run ended. The numbers are
also in `accuracy.json`, written by `evaluate.py`.

## Data and training

All text comes from the seeded templates and word lists in `tools/demo_model/`. Training used
{tokens} tokens in {steps} steps ({minutes:.0f} minutes of wall-clock time on
two shared CPU cores, bfloat16 autocast), with Muon for the matrices, AdamW for embeddings and
norms, and a constant learning rate that falls linearly over the last part. The loss counts replies
only. These weights were trained in several phases: first with a rate three times as high and
batches of 4,096 tokens, then with `--rows 4` up to step 15,036, then with more sums, including
those to decline, and finally with the sums that were still wrong. The shares of the kinds of sums
changed between phases, so a new run will differ a little.

Llama architecture: {shape}.
The tokenizer is byte-level BPE with {vocab} tokens, and every digit is a separate token. Training
conversations have at most 512 tokens. The context is 1,024 tokens, but expect incoherent answers
beyond about 500.

## Sampling

`generation_config.json` sets temperature {temperature} and top-p {top_p}: stories vary, but facts
stay correct. Temperature 0 is the most accurate.

## Train and measure it yourself

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
    """Write the model card."""
    (directory / "README.md").write_text(card(directory))


if __name__ == "__main__":
    typer.run(main)
