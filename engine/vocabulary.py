"""Whether two models mean the same by a token id.

Reads tokenizer.json as far as ids are named there; knows no model and no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.model_dir.bounded import read_json
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def check_same_vocabulary(model_dir: Path, draft_dir: Path) -> None:
    """Refuse a draft model whose token ids mean something else.

    Raises:
      ConfigError: says which id differs, or whose tokenizer is missing.
    """
    model, draft = _tokens(model_dir), _tokens(draft_dir)
    different = [
        token_id
        for token_id in sorted({*model, *draft})
        if model.get(token_id) != draft.get(token_id)
    ]
    if different:
        first = different[0]
        raise ConfigError(
            f"speculate is {str(draft_dir)!r}, whose vocabulary is another one than that of "
            f"{str(model_dir)!r}: {len(different)} token ids differ, the first is {first} "
            f"({draft.get(first)!r} there, {model.get(first)!r} here); use a draft model of the "
            "same family, or speculate lookup"
        )


def _tokens(directory: Path) -> dict[int, str]:
    path = directory / "tokenizer.json"
    try:
        document = read_json(path)
        vocabulary = document["model"]["vocab"]
        # Of a unigram model it is a list of pieces with their scores.
        pieces = (
            {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
            if isinstance(vocabulary, list)
            else vocabulary
        )
        added = {token["content"]: token["id"] for token in document.get("added_tokens", ())}
    except (ConfigError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"speculate needs the tokenizer of both models, and {path} cannot be read: {error}"
        ) from error
    return {token_id: token for token, token_id in (pieces | added).items()}
