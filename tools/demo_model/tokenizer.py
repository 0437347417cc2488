"""Train the demo model's tokenizer (byte-level BPE), and define its chat template.

Any text can be encoded. Every digit is a separate token. A hyphen and the letter after it form one
token, so that a spelled word takes one token per letter.
"""

from collections.abc import Iterator
from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from .corpus import Conversation, conversations

VOCAB_SIZE = 2048
BOS, END, SYSTEM, USER, ASSISTANT, PAD = (
    "<|bos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
)
SPECIALS: tuple[str, ...] = (BOS, END, SYSTEM, USER, ASSISTANT, PAD)
BOS_ID, END_ID, PAD_ID = 0, 1, 5

_PIECES = r"'(?:s|t|re|ve|m|ll|d)\b|[ \-]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{- '<|bos|>' -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] in ('system', 'developer') -%}{{- '<|system|>' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- else -%}{{- '<|user|>' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- message['content'] | trim -}}"
    "{%- else -%}{%- for part in message['content'] or [] -%}"
    "{%- if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def _texts(seed: int, count: int) -> Iterator[str]:
    for talk in islice(conversations(seed), count):
        for exchange in talk.exchanges:
            yield exchange.user
            yield exchange.reply
        if talk.system:
            yield talk.system


def train_tokenizer(seed: int = 1, count: int = 30_000) -> Tokenizer:
    """Train the tokenizer on `count` generated conversations."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, count), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode_conversation(tokenizer: Tokenizer, talk: Conversation) -> tuple[list[int], list[bool]]:
    """Encode a conversation as the chat template renders it.

    Returns:
      The token ids, and a flag per id that is true for replies and their end tokens.
    """
    pieces = [(f"{SYSTEM}{talk.system}{END}", False)] if talk.system else []
    for exchange in talk.exchanges:
        pieces.append((f"{USER}{exchange.user.strip()}{END}{ASSISTANT}", False))
        pieces.append((f"{exchange.reply}{END}", True))
    ids, learned = [BOS_ID], [False]
    for text, is_reply in pieces:
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        ids += encoded
        learned += [is_reply] * len(encoded)
    return ids, learned
