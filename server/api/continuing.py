"""`continue_final_message`: a conversation whose last turn is the model's own, and not over yet.

Templates close every turn. So a mark is put behind the last words, and the rendered prompt is cut
there: what a template writes around a turn may look like the words themselves, and it may strip
them. Knows messages and text; knows no template.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from triolet.errors import invalid_request

if TYPE_CHECKING:
    from ..text.tokenizer import ChatPrompt
    from .schemas import ChatRequest

PARAM = "continue_final_message"


def check_continued(fields: ChatRequest) -> None:
    """Raise the RequestError for a conversation whose last turn cannot be continued."""
    if fields.add_generation_prompt:
        raise invalid_request(f"contradicts {PARAM}", "add_generation_prompt")
    last = fields.messages[-1]
    if last.role != "assistant" or not last.content:
        raise invalid_request("needs a last message of the assistant, with words in it", PARAM)


def new_mark() -> str:
    """Return what no conversation holds, and what no template strips."""
    return secrets.token_hex(16)


def marked(messages: list[dict[str, object]], mark: str) -> list[dict[str, object]]:
    """Return the conversation with a mark behind its last words."""
    *earlier, last = messages
    return [*earlier, last | {"content": f"{last['content']}{mark}"}]


def up_to_mark(prompt: ChatPrompt, mark: str) -> ChatPrompt:
    """Return a rendered conversation up to its last words.

    Raises:
      RequestError: the template does not show them, or more than once.
    """
    begun = prompt.up_to(mark)
    if begun is None:
        raise invalid_request("the template does not show the last message as it is", PARAM)
    return begun
