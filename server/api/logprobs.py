"""Logprobs in the two forms of the API. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..contract.generation import TokenLogprob


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the value of `logprobs.content` of a chat choice."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.raw),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(raw)}
                for _, text, raw, logprob in token.top
            ],
        }
        for token in tokens
    ]


def completion_logprobs(tokens: Iterable[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return the value of `logprobs` of a plain completion.

    Args:
      tokens: in order.
      offset: characters of the completion's text before the first of them.
    """
    names, logprobs, tops, offsets = [], [], [], []
    for token in tokens:
        names.append(token.text)
        logprobs.append(token.logprob)
        tops.append({text: logprob for _, text, _, logprob in token.top})
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }
