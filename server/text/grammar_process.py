"""A process that says whether grammars can be used. Run by server/text/grammars.py.

Holds the model's tokenizer, and forks for each grammar: the child compiles it and may be killed by
the kernel once its processor time or memory is used up, whatever the compiler does then. Knows no
clients. Questions come on stdin, answers go to stdout, one after the other; the end of stdin is the
end of the process.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import struct
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from triolet.grammar import (
    GrammarError,
    GrammarTooCostly,
    build_tokenizer,
    compile_grammar,
)
from triolet.sampling import Grammar, GrammarKind

from .grammar_walks import WalkBounds, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.grammar import LLTokenizer

LENGTH: Final = struct.Struct("<I")
NICENESS: Final = 5
"""Stands back for the server: a grammar may wait, tokens may not."""
MAX_ANSWER_BYTES: Final = 4096


class Bounds(NamedTuple):
    """What one grammar may take.

    Attributes:
      cpu_s: of processor time to compile it, and for its first mask.
      memory_bytes: on top of what the process has.
      walks: for walks through it.
    """

    cpu_s: float
    memory_bytes: int
    walks: WalkBounds


class Answer(IntEnum):
    """The first byte of an answer; a message follows."""

    USABLE = 0
    REFUSED = 1
    TOO_COSTLY = 2


def question(grammar: Grammar) -> bytes:
    """Return a grammar as it is sent to the process."""
    body = f"{grammar.kind}\n{grammar.text}".encode()
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Answer until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--eos", type=int, nargs="+", required=True)
    parser.add_argument("--cpu-s", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--walk-tokens", type=int, required=True)
    parser.add_argument("--walk-mask-cpu-s", type=float, required=True)
    parser.add_argument("--walk-cpu-s", type=float, required=True)
    options = parser.parse_args()
    walks = WalkBounds(options.walk_tokens, options.walk_mask_cpu_s, options.walk_cpu_s)
    bounds = Bounds(options.cpu_s, options.memory_bytes, walks)
    # The terminal's Ctrl-C is the server's to heed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    try:
        text = options.tokenizer.read_text(encoding="utf-8")
        tokenizer = build_tokenizer(text, options.eos)
    except (GrammarError, OSError) as error:
        _answer_all(str(error))
        return
    while (body := _read()) is not None:
        kind, _, text = body.decode().partition("\n")
        grammar = Grammar(GrammarKind(kind), text)
        _write(_ask_child(tokenizer, grammar, options.eos, bounds))


def _answer_all(message: str) -> None:
    while _read() is not None:
        _write(bytes([Answer.REFUSED]) + message.encode())


def _read() -> bytes | None:
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = sys.stdin.buffer.read(length)
    return body if len(body) == length else None


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
    sys.stdout.buffer.flush()


def _ask_child(
    tokenizer: LLTokenizer, grammar: Grammar, eos_token_ids: Sequence[int], bounds: Bounds
) -> bytes:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Never returns into the loop of its parent, whatever happens.
        try:
            os.close(reading)
            _limit(bounds.cpu_s, bounds.memory_bytes)
            os.write(writing, _verdict(tokenizer, grammar, eos_token_ids, bounds.walks))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read(MAX_ANSWER_BYTES)
    os.waitpid(child, 0)
    return answer or bytes([Answer.TOO_COSTLY])


def _limit(cpu_s: float, memory_bytes: int) -> None:
    """Have the kernel end this process when its time is up, or refuse it memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    # What a compiler that runs out of memory says on its way out is nobody's to read.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _verdict(
    tokenizer: LLTokenizer, grammar: Grammar, eos_token_ids: Sequence[int], bounds: WalkBounds
) -> bytes:
    try:
        matcher = compile_grammar(tokenizer, grammar)
        mask = matcher.compute_bitmask()
        if any(mask) and not matcher.is_error():
            # One mask of the walks may go on when their time is up.
            signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s + bounds.mask_cpu_s)
            walk(tokenizer, matcher, eos_token_ids, bounds)
    except GrammarTooCostly as error:
        return bytes([Answer.TOO_COSTLY]) + f"is too costly to follow: {error}".encode()
    except (GrammarError, MemoryError) as error:
        return bytes([Answer.REFUSED]) + str(error).encode()
    is_impossible = matcher.stop_reason() in ("NoExtension", "NoExtensionBias")
    if matcher.is_error() and not is_impossible:
        return bytes([Answer.TOO_COSTLY])
    if is_impossible or not any(mask):
        return bytes([Answer.REFUSED]) + b"it allows no completion"
    return bytes([Answer.USABLE])


if __name__ == "__main__":
    main()
