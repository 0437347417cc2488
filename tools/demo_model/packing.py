"""Pack whole conversations into training rows of equal length."""

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import conversations
from .tokenizer import PAD_ID, encode_conversation

_SHELF = 24
"""Conversations to choose from while a row is filled. This many make rows 98 % full."""


def rows(
    tokenizer: Tokenizer, seed: int, length: int, shares: dict[str, float] | None = None
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield rows of `length + 1` ids, with a flag per id that is true for replies."""
    source = conversations(seed, shares)
    shelf: list[tuple[list[int], list[bool]]] = []
    while True:
        ids: list[int] = []
        learned: list[bool] = []
        while True:
            while len(shelf) < _SHELF:
                encoded = encode_conversation(tokenizer, next(source))
                if len(encoded[0]) <= length + 1:
                    shelf.append(encoded)
            room = length + 1 - len(ids)
            fitting = [i for i, (talk, _) in enumerate(shelf) if len(talk) <= room]
            if not fitting:
                break
            talk, flags = shelf.pop(fitting[0])
            ids += talk
            learned += flags
        padding = length + 1 - len(ids)
        yield ids + [PAD_ID] * padding, learned + [False] * padding


def batches(
    tokenizer: Tokenizer, seed: int, length: int, size: int, shares: dict[str, float] | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield inputs, targets [size, length] and a mask of the targets that count for the loss."""
    source = rows(tokenizer, seed, length, shares)
    while True:
        drawn = [next(source) for _ in range(size)]
        ids = torch.tensor([row for row, _ in drawn])
        learned = torch.tensor([flags for _, flags in drawn])
        yield ids[:, :-1], ids[:, 1:], learned[:, 1:]
