"""`triolet chat`: a chat in the terminal, or one answer per line of piped input.

Streams each answer and prints its timing. chat_client.py sends the requests.
"""

from __future__ import annotations

import io
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from triolet.plain_text import printable

from ..exit_codes import CommandFailed
from .chat_client import AnswerFailed, AnswerTimes, ChatClient, ChatMessage, Thought
from .word_wrap import WordWrap

if TYPE_CHECKING:
    from collections.abc import Generator

ACCENT: Final = "bright_magenta"
PROMPT: Final = "› "
THINKING: Final = "Thinking…"
"""Shown in place of the reasoning of a model."""
HELP: Final = "/new starts a new conversation, /quit exits. Ctrl-C stops an answer."


def run_chat(
    url: str,
    model: str | None = None,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> None:
    """Chat until the input ends. The server chooses parameters that are None.

    Args:
      url: base address of the server.
      model: model name.
      max_tokens: maximum length of an answer.
      temperature: sampling temperature.

    Raises:
      CommandFailed: no server answers, or (in a pipe) an answer failed.
    """
    given = {"max_tokens": max_tokens, "temperature": temperature}
    parameters = {name: value for name, value in given.items() if value is not None}
    client = ChatClient(url, parameters)
    try:
        conversation = Conversation(client, model or client.model_name())
        if sys.stdin.isatty() and sys.stdout.isatty():
            _talk(conversation, url)
        else:
            if isinstance(sys.stdin, io.TextIOWrapper):
                # A pipe may hold any bytes: replace those that are not UTF-8.
                sys.stdin.reconfigure(encoding="utf-8", errors="replace")
            _answer_lines(conversation)
    finally:
        client.close()


class Conversation:
    """The turns so far. A turn that ended before any text arrived is not kept."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self.model = model
        self.num_forgotten = 0
        self._client = client
        self._messages: list[ChatMessage] = []

    def begin_anew(self) -> None:
        """Forget all turns."""
        self._messages.clear()

    def ask(self, question: str, times: AnswerTimes) -> Generator[str]:
        """Yield the answer. A partial answer stays in the conversation.

        Drops the oldest turns when the conversation exceeds the context length.
        """
        self.num_forgotten = 0
        self._messages.append({"role": "user", "content": question})
        answer = reasoning = ""
        try:
            while True:
                try:
                    with closing(self._client.ask(self.model, self._messages, times)) as pieces:
                        for piece in pieces:
                            if isinstance(piece, Thought):
                                reasoning += piece
                            else:
                                answer += piece
                            yield piece
                    return
                except AnswerFailed as error:
                    has_begun = bool(answer or reasoning)
                    is_too_long = error.code == "context_length_exceeded" and not has_begun
                    if not is_too_long or len(self._messages) < 3:
                        raise
                    del self._messages[:2]
                    self.num_forgotten += 1
        finally:
            if answer:
                turn: ChatMessage = {"role": "assistant", "content": answer}
                if reasoning:
                    turn["reasoning_content"] = reasoning
                self._messages.append(turn)
            else:
                self._messages.pop()


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        question = line.strip()
        if question == "/new":
            conversation.begin_anew()
        elif question == "/quit":
            return
        elif question:
            for piece in conversation.ask(question, AnswerTimes(time.monotonic())):
                if not isinstance(piece, Thought):
                    sys.stdout.write(piece)
                    sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()


def _talk(conversation: Conversation, url: str) -> None:
    console = Console(highlight=False)
    console.print(
        Text.assemble(
            ("\nTriolet", f"bold {ACCENT}"), ("  chatting with ", "dim"), conversation.model
        ),
        Text(f"{url}\n{HELP}\n", style="dim"),
        sep="\n",
    )
    while True:
        try:
            question = console.input(Text(PROMPT, style=f"bold {ACCENT}")).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        match question:
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/new":
                conversation.begin_anew()
                console.print(Text("New conversation.\n", style="dim"))
            case "/help":
                console.print(Text(f"{HELP}\n", style="dim"))
            case _ if question.startswith("/"):
                console.print(Text(f"Unknown command {question}. {HELP}\n", style="dim"))
            case _:
                _show_answer(console, conversation, question)


def _show_answer(console: Console, conversation: Conversation, question: str) -> None:
    def write(text: str) -> None:
        console.print(Text(text), end="", soft_wrap=True)

    times = AnswerTimes(time.monotonic())
    note = ""
    wrap = WordWrap(console.width)
    pieces = conversation.ask(question, times)
    is_thinking = False
    try:
        for piece in pieces:
            if isinstance(piece, Thought):
                if not is_thinking:
                    console.print(Text(THINKING, style="dim"))
                is_thinking = True
            else:
                write(wrap.feed(printable(piece)))
    except KeyboardInterrupt:
        note = "stopped"
    except CommandFailed as error:
        note = str(error)
    finally:
        # End the request now rather than when the generator is collected.
        pieces.close()
        write(wrap.finish())
    if times.first_at is not None:
        console.print()
    console.print(Text(f"{summary(times, conversation.num_forgotten, note)}\n", style="dim"))


def summary(times: AnswerTimes, num_forgotten: int, note: str) -> str:
    """Return one line with the timing and end of an answer."""
    parts = []
    if times.ttft_s is not None:
        parts.append(f"first token {times.ttft_s * 1000:.0f} ms")
    if times.tokens is not None:
        parts.append(f"{times.tokens} token{'' if times.tokens == 1 else 's'}")
    if times.tokens_per_s is not None:
        parts.append(f"{times.tokens_per_s:.0f} tokens/s")
    if times.finish_reason == "length":
        parts.append("cut at the maximum length")
    if num_forgotten:
        parts.append(f"context full, oldest turns dropped: {num_forgotten}")
    if note:
        parts.append(note)
    return " · ".join(parts)
