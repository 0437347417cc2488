"""What the chat page says before the first question: `page.json` of the model's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triolet.errors import ModelError

from .model_files import read_json

FILE_NAME: Final = "page.json"
MAX_CARDS: Final = 12
"""More suggestions than that are no help to choose."""
MAX_CHARS: Final = 400
"""Of each text."""


@dataclass(frozen=True, slots=True)
class PageWords:
    """What a model's page says.

    Attributes:
      lead: the sentence below the greeting; None for the page's own.
      cards: (title, question) of each suggestion; none for the page's own.
      has_chat_template: whether the model can chat at all.
    """

    lead: str | None = None
    cards: tuple[tuple[str, str], ...] = ()
    has_chat_template: bool = True

    def document(self) -> dict[str, Any]:
        """Return it as clients see it."""
        cards = [{"title": title, "question": question} for title, question in self.cards]
        return {"lead": self.lead, "cards": cards, "has_chat_template": self.has_chat_template}


def read_page_words(model_dir: str | Path, *, has_chat_template: bool) -> PageWords:
    """Read what a model directory says, if it does.

    Raises:
      ModelError: the file is broken.
    """
    path = Path(model_dir) / FILE_NAME
    fields = read_json(path, is_optional=True)
    lead, cards = fields.get("lead"), fields.get("cards", [])
    if not isinstance(cards, list) or len(cards) > MAX_CARDS:
        raise ModelError(f"cards in {path} is no list of up to {MAX_CARDS}; correct or remove it")
    if lead is not None:
        _text(path, "lead", lead)
    pairs = []
    for card in cards:
        if not isinstance(card, dict):
            raise ModelError(f"a card in {path} is no object; correct or remove it")
        pairs.append(tuple(_text(path, key, card.get(key)) for key in ("title", "question")))
    return PageWords(
        None if lead is None else str(lead),
        tuple((title, question) for title, question in pairs),
        has_chat_template,
    )


def _text(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CHARS:
        raise ModelError(
            f"{key} in {path} is {value!r}; allowed: a text of up to {MAX_CHARS} characters"
        )
    return value
