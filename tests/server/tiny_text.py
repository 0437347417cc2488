"""A byte-level tokenizer for tests: 256 byte tokens, some words, three special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.text.detokenizer import _byte_level_alphabet
from server.text.model_files import TextFiles
from server.text.process import Do, at_once
from server.text.tokenizer import TextModel, TextSource
from triolet.config import ReasoningParser

if TYPE_CHECKING:
    from collections.abc import Sequence


BOS, EOS, PAD = "<|bos|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_tokenizer(specials: Sequence[str] = (), markers: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer without merges: token i below 256 is byte i.

    Args:
      specials: additional special tokens.
      markers: additional tokens that are not special.
    """
    of_byte = {raw[0]: char for char, raw in _byte_level_alphabet().items()}
    vocabulary = {of_byte[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added: list[str | AddedToken] = [
        AddedToken(content, normalized=False, special=True)
        for content in (BOS, EOS, PAD, *specials)
    ]
    tokenizer.add_special_tokens(added)
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in markers])
    return tokenizer


BOS_ID, EOS_ID, PAD_ID = 256, 257, 258


def tiny_text(
    *,
    template: str = TEMPLATE,
    max_model_len: int = 4096,
    specials: Sequence[str] = (),
    markers: Sequence[str] = (),
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO,
    generic_tools: bool = True,
    do: Do | None = None,
) -> TextModel:
    """Return a text model with bytes as tokens, plus `specials` and `markers`."""
    files = TextFiles(
        tokenizer=tiny_tokenizer(specials, markers),
        eos_token_ids=(EOS_ID,),
        max_model_len=max_model_len,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        chat_templates={"default": template} if template else {},
    )
    model = TextModel(
        files,
        reasoning_parser=reasoning_parser,
        generic_tools=generic_tools,
    )
    if do is not None:
        model._elsewhere = (do, _Here.of(model))
    return model


class _Here(TextSource):
    """The source of an in-memory model, for work done in this process."""

    models: ClassVar[dict[str, TextModel]] = {}

    @classmethod
    def of(cls, model: TextModel) -> TextSource:
        """Return the source of a model."""
        name = str(id(model))
        cls.models[name] = model
        return cls(name, "", "", False, (), "")  # type: ignore[arg-type]

    def load(self, do: Do = at_once) -> TextModel:
        """Return the model."""
        del do
        return self.models[self.model_dir]
