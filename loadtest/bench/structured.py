"""Whether every completion keeps to its schema, what that costs, and what hostile schemas cost.

One fleet with the demo model. Random schemas (loadtest/schemas.py) are asked for by several clients
at once, and every answer is validated by jsonschema. Then the same prompts with and without a
schema take turns, which compares the time per token. Then hostile grammars are sent while a canary
stream goes on. Then each grammar that costs more with every token is sent again and again over
several connections, and as many requests without one, beside the canary and by turns with it
alone. Exits with 1 if an answer does not validate, a hostile one was not dealt with in time, or the
canary's tokens changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx2
import jsonschema
import trio
from rich.console import Console

from ..harness.progress import announce, progress
from ..harness.servers import running_server
from ..harness.statistics import percentile
from ..schemas import Schema, costly, hostile, random_schema

MAX_TOKENS: Final = 900
HOSTILE_S: Final = 0.3
"""Within which a hostile grammar has to be refused."""
HOSTILE_TOKENS: Final = 32
"""What is harmless to compile may cost its tokens."""
HARMLESS: Final = "no grammar"
"""As many requests without one: what any company costs the canary."""
CANARY_TOKENS: Final = 300
"""Of the stream beside which one kind of costly grammars is sent."""
ATTACKERS: Final = 4
"""Connections that send it."""
PAUSE_S: Final = 0.1
"""Between two requests of each: the clients share their process, and the cores, with the canary."""
TIMEOUT_S: Final = 120.0
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = [{"role": "user", "content": "Tell me a story about a fox."}]


@dataclass(slots=True)
class Attack:
    """One kind of costly grammars beside a canary.

    Attributes:
      alone: seconds between two tokens of the canary, by round.
      beside: the same while the grammars come.
      answers: how many requests of the attackers ended how.
    """

    alone: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Found:
    """What was seen.

    Attributes:
      num_valid: answers that validate.
      num_cut: answers that ended at max_tokens.
      wrong: what does not validate, by seed.
      seconds: between two tokens, by kind.
      refusals: seconds and status of each hostile request, by name.
      attacks: what a canary noticed of costly grammars, by name.
      is_changed: whether a canary's tokens were not those that it has alone.
    """

    num_valid: int = 0
    num_cut: int = 0
    wrong: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    refusals: dict[str, tuple[float, int]] = field(default_factory=dict)
    attacks: dict[str, Attack] = field(default_factory=dict)
    is_changed: bool = False


def asked(seed: int, schema: Schema | None) -> dict[str, Any]:
    """Return the body of a request."""
    body = {"messages": MESSAGES, "seed": seed, "temperature": 1.0, "max_tokens": MAX_TOKENS}
    if schema is not None:
        form = {"name": f"schema-{seed}", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


async def validate_all(
    client: httpx2.AsyncClient, count: int, first: int, num_clients: int, found: Found
) -> None:
    """Ask for every schema once and validate what comes."""
    seeds = iter(range(first, first + count))

    async def ask() -> None:
        for seed in seeds:
            schema = random_schema(seed)
            answer = await client.post(CHAT, json=asked(seed, schema))
            if answer.status_code != 200:
                found.wrong[seed] = answer.text[:200]
                continue
            choice = answer.json()["choices"][0]
            judge(seed, schema, choice["message"]["content"], choice["finish_reason"], found)

    async with trio.open_nursery() as nursery:
        for _ in range(num_clients):
            nursery.start_soon(ask)


def judge(seed: int, schema: Schema, text: str, reason: str, found: Found) -> None:
    """Note whether an answer keeps to its schema."""
    if reason == "length":
        found.num_cut += 1
        return
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        found.wrong[seed] = f"{str(error)[:120]} in {text[:120]}"
    else:
        found.num_valid += 1


async def gaps_of(
    client: httpx2.AsyncClient, body: dict[str, Any], token_ids: list[int] | None = None
) -> list[float]:
    """Return the seconds between the chunks of a stream; its tokens are added to `token_ids`."""
    gaps: list[float] = []
    last = None
    streamed = body | {"stream": True, "return_token_ids": True}
    async with client.stream("POST", CHAT, json=streamed) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and '"token_ids":[' in line:
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if token_ids is not None:
                    token_ids += json.loads(line[6:])["choices"][0]["token_ids"]
    return gaps


async def compare(client: httpx2.AsyncClient, rounds: int, found: Found) -> None:
    """Take turns with and without a schema."""
    free: list[float] = found.seconds.setdefault("free", [])
    bound: list[float] = found.seconds.setdefault("with a schema", [])
    for seed in range(rounds):
        schema = {"type": "array", "items": random_schema(seed), "minItems": 3}
        bound += await gaps_of(client, asked(seed, schema) | {"max_tokens": 100})
        free += await gaps_of(client, asked(seed, None) | {"max_tokens": 100, "ignore_eos": True})


async def attack(client: httpx2.AsyncClient, found: Found) -> None:
    """Send everything hostile while a canary streams, and once more nothing."""
    canary = asked(0, None) | {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    found.seconds["canary alone"] = await gaps_of(client, canary)

    async def send() -> None:
        for name, fields in hostile().items():
            began_at = time.perf_counter()
            answer = await client.post(
                CHAT, json=asked(0, None) | {"max_tokens": HOSTILE_TOKENS} | fields
            )
            found.refusals[name] = time.perf_counter() - began_at, answer.status_code

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        found.seconds["canary beside hostile"] = await gaps_of(client, canary)


async def wear(client: httpx2.AsyncClient, rounds: int, found: Found) -> None:
    """Send each costly grammar again and again beside a canary, by turns with the canary alone."""
    canary = asked(0, None) | {
        "max_tokens": CANARY_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    expected: list[int] = []
    await gaps_of(client, canary, expected)
    for name, fields in {HARMLESS: {}, **costly()}.items():
        attack = found.attacks.setdefault(name, Attack())
        for _ in range(rounds):
            for gaps, num_attackers in ((attack.alone, 0), (attack.beside, ATTACKERS)):
                token_ids: list[int] = []
                async with trio.open_nursery() as nursery:
                    for number in range(num_attackers):
                        nursery.start_soon(_send_again, client, fields, number, attack.answers)
                    gaps.append(await gaps_of(client, canary, token_ids))
                    nursery.cancel_scope.cancel()
                found.is_changed |= token_ids != expected
        p99_s = statistics.median(percentile(gaps, 99) for gaps in attack.beside)
        progress(f"{name}: gaps p99 {p99_s * 1e3:.2f} ms beside it")


async def _send_again(
    client: httpx2.AsyncClient, fields: dict[str, Any], number: int, answers: Counter[str]
) -> None:
    body = asked(number, None) | {"max_tokens": CANARY_TOKENS, "min_tokens": CANARY_TOKENS}
    while True:
        await trio.sleep(PAUSE_S)
        answer = await client.post(CHAT, json=body | fields)
        error = answer.json().get("error")
        answers[str(answer.status_code) if error is None else str(error["code"])] += 1


async def measure(url: str, arguments: argparse.Namespace) -> Found:
    """Do all of it."""
    found = Found()
    async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await client.post(CHAT, json=asked(0, random_schema(0)))
        await validate_all(client, arguments.count, arguments.first, arguments.clients, found)
        progress(f"{found.num_valid} answers are valid, {found.num_cut} cut by max_tokens")
        await compare(client, arguments.rounds, found)
        progress("streams with and without a schema are timed; next: hostile schemas")
        await attack(client, found)
        await wear(client, arguments.rounds, found)
    return found


def show(found: Found, console: Console) -> bool:
    """Print what was seen; return whether it is as it must be."""
    console.print(f"valid {found.num_valid}, cut by max_tokens {found.num_cut}")
    for seed, message in found.wrong.items():
        console.print(f"seed {seed}: {message}", markup=False)
    for kind, gaps in found.seconds.items():
        if len(gaps) > 1:
            p50, p99 = (percentile(gaps, percent) for percent in (50, 99))
            mean = statistics.mean(gaps)
            console.print(
                f"{kind}: ms per token: mean {mean * 1e3:.2f}, "
                f"p50 {p50 * 1e3:.2f}, p99 {p99 * 1e3:.2f} ({len(gaps)} tokens)"
            )
    is_in_time = True
    for name, (seconds, status) in found.refusals.items():
        is_good = status == 200 or (status == 400 and seconds <= HOSTILE_S)
        is_in_time &= is_good
        verdict = "" if is_good else "  TOO LATE, or not refused as it should be"
        console.print(f"{name}: {status} after {seconds * 1e3:.0f} ms{verdict}")
    _show_attacks(found, console)
    return is_in_time and not found.wrong and not found.is_changed


def _show_attacks(found: Found, console: Console) -> None:
    for name, attack in found.attacks.items():
        alone, beside = (
            statistics.median(percentile(gaps, 99) for gaps in rounds)
            for rounds in (attack.alone, attack.beside)
        )
        answers = ", ".join(f"{count} × {word}" for word, count in attack.answers.most_common())
        console.print(
            f"{name}: gaps p99 {alone * 1e3:.2f} ms alone, {beside * 1e3:.2f} ms beside "
            f"({beside / alone:.2f} ×); ended meanwhile: {answers or 'none'}",
            markup=False,
        )
    if found.is_changed:
        console.print("the canary's tokens are NOT those that it has alone")


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="schemas")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison")
    arguments = parser.parse_args()
    announce(__doc__)
    with TemporaryDirectory() as directory:
        log = Path(directory) / "fleet.log"
        with running_server(["--kv-pool", "64MiB"], log) as url:
            found = trio.run(measure, url, arguments)
    return 0 if show(found, Console()) else 1


if __name__ == "__main__":
    sys.exit(main())
