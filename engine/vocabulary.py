"""Check that a draft model has the same token ids as its target model, from tokenizer.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from store.model_dir.bounded import read_json
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def check_same_vocabulary(model_dir: Path, draft_dir: Path) -> None:
    """Refuse a draft model with another vocabulary.

    Raises:
      ConfigError: a token id differs, or a tokenizer is missing.
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
            f"speculate is {str(draft_dir)!r}, whose vocabulary differs from that of "
            f"{str(model_dir)!r}: {len(different)} token ids differ, the first is {first} "
            f"({draft.get(first)!r} there, {model.get(first)!r} here); use a draft model of the "
            "same family, or speculate lookup"
        )


def _tokens(directory: Path) -> dict[int, str]:
    path = directory / "tokenizer.json"
    try:
        document = read_json(path)
        vocabulary = document["model"]["vocab"]
        # A unigram model has a list of (piece, score).
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
