"""`TextModel`, the textual side of a served model: texts and conversations to token ids, and ids to
text; with its tokenizer, chat template, grammars and forms of tool calls.

What takes long is done in text processes (processes.py), which have read the same model.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from functools import lru_cache, partial
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
)

from triolet.config import ReasoningParser, TemplateConfig, ToolParser
from triolet.errors import invalid_request
from triolet.process import return_free_memory

from .detokenizer import Detokenizer, TokenText, Vocabulary
from .isolated import run_isolated
from .model_files import TextFiles, read_text_files
from .process import Do, Work, at_once, job
from .special_tokens import ChatPrompt, SpecialTokenGuard, literal_tokenizer
from .template import ChatTemplate, decoded_rendering, encoded_rendering
from .tool_forms.generic import GENERIC, ToolSupport, with_tools_in_words
from .tool_forms.reasoning import find_reasoner
from .tool_forms.scanning import parsed_arguments
from .tool_forms.table import HARMONY, form_of

if TYPE_CHECKING:
    from pathlib import Path


_T = TypeVar("_T")

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Turns in the words of chat templates. Arguments of calls may be JSON, which is parsed where they
are rendered: it may be megabytes."""
Method: TypeAlias = Literal["encoded", "rendered", "decoded"]
"""What a text process is asked of a model's text."""

MAX_MODELS: Final = 8
"""Models that a text process keeps, each of some tens of megabytes: those used last."""
INLINE_CHARS: Final = 1024
"""Texts up to here are encoded at once, mostly in half a millisecond, all of one request together.
A text process would take as long to be asked and to be heard. The slowest found take 6 ms: words of
99 letters that a vocabulary of WordPiece lacks, and ligatures that NFKC makes 18 characters of."""
INLINE_IDS: Final = 1024
"""Ids up to here are decoded at once."""
INLINE_WEIGHT: Final = 16 * 1024
"""Conversations up to here are rendered at once, in some 0.3 ms: characters, and ITEM_WEIGHT for
each message, field and tool."""
ITEM_WEIGHT: Final = 16


PROMPT = "prompt"
MESSAGES = "messages"


def new_nonce() -> str:
    """Return 64 random bits: a user cannot write them."""
    return secrets.token_hex(8)


class TextSource(NamedTuple):
    """What a process needs to read a model's textual side, and to be understood by others.

    Attributes:
      model_dir: its directory.
      tool_parser: a ToolParser's value: how the model writes calls of tools.
      reasoning_parser: a ReasoningParser's: how the model's reasoning is told apart.
      generic_tools: where the chat template shows no tools, the system prompt does.
      bounds: a TemplateConfig's values.
      nonce: of the names of special tokens, in all processes that work for one server.
    """

    model_dir: str
    tool_parser: str
    reasoning_parser: str
    generic_tools: bool
    bounds: tuple[float, int, int]
    nonce: str

    def load(self, do: Do = at_once) -> TextModel:
        """Read the model directory.

        Args:
          do: does what takes long.

        Raises:
          ModelError: a file is missing or broken, or lacks a marker of the reasoning.
        """
        text = TextModel(
            read_text_files(self.model_dir),
            tool_parser=ToolParser(self.tool_parser),
            reasoning_parser=ReasoningParser(self.reasoning_parser),
            generic_tools=self.generic_tools,
            bounds=TemplateConfig(*self.bounds),
            nonce=self.nonce,
            elsewhere=None if do is at_once else (do, self),
        )
        return_free_memory()
        return text


@lru_cache(maxsize=MAX_MODELS)
def text_of(source: TextSource) -> TextModel:
    """Return a model's textual side, read once by this process."""
    return source.load()


@job
def on_text(source: Sequence[Any], name: Method, *args: object) -> object:
    """Return what a method of a model's text makes of some values.

    Args:
      source: a TextSource.
      name: of the method.
      args: what it is given.
    """
    assert name in get_args(Method), "nothing else may be asked for"
    if not isinstance(source, TextSource):
        source = TextSource._make(tuple(one) if isinstance(one, list) else one for one in source)
    return getattr(text_of(source), name)(*args)


def with_parsed_arguments(messages: Conversation) -> list[dict[str, Any]]:
    """Return a conversation as templates want it: arguments of calls are objects, if they are."""
    found = []
    for message in messages:
        turn = {**message}
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [
                {**call, "function": {**function, "arguments": parsed_arguments(given)}}
                if isinstance(given := (function := call["function"])["arguments"], str)
                else call
                for call in calls
            ]
        found.append(turn)
    return found


class TextModel:
    """The textual side of the served model.

    Args:
      files: what its directory says.
      tool_parser: how the model writes calls of tools.
      reasoning_parser: how the model's reasoning is told apart.
      nonce: see TextSource; None for one of its own.
      elsewhere: what does work that takes long, in processes that read the model from the source;
        None to do all of it in place.
      generic_tools: where the chat template shows no tools, the system prompt does.
      bounds: of renderings that may cost more than what they are given.

    Attributes:
      eos_token_ids: every id that ends a sequence.
      max_model_len: positions that the model was made for.
      tools: how the model is told of them.
      tool_form: how the model writes calls of tools.
      reasoner: how the model reasons; None if it does not.
      tool_tokens: ids of the markers of that form that are single tokens.
      tool_markers: special tokens among them, and how the text of an answer shows each.
      vocab_size: ids that the tokenizer knows are below this.
      first_work: what makes a text process read the model.
    """

    def __init__(
        self,
        files: TextFiles,
        *,
        tool_parser: ToolParser = ToolParser.AUTO,
        reasoning_parser: ReasoningParser = ReasoningParser.AUTO,
        nonce: str | None = None,
        bounds: TemplateConfig = TemplateConfig(),  # noqa: B008 (frozen)
        elsewhere: tuple[Do, TextSource] | None = None,
        generic_tools: bool = True,
    ) -> None:
        self.eos_token_ids = files.eos_token_ids
        self.max_model_len = files.max_model_len
        added = files.tokenizer.get_added_tokens_decoder()
        self.tool_form = form_of(
            files.chat_templates.values(), (token.content for token in added.values()), tool_parser
        )
        self._template = (
            ChatTemplate(files.chat_templates, files.special_tokens)
            if files.chat_templates
            else None
        )
        self._ask_template(generic_tools=generic_tools)
        self.reasoner = find_reasoner(
            reasoning_parser,
            files.tokenizer,
            files.chat_templates,
            is_harmony=self.tool_form is HARMONY,
        )
        self.vocab_size = files.tokenizer.get_vocab_size(with_added_tokens=True)
        self._tokenizer = files.tokenizer
        self._vocabulary = Vocabulary(files.tokenizer)
        markers = self.tool_form.markers
        self.tool_tokens = {t.content: i for i, t in added.items() if t.content in markers}
        self._specials = {i: token for i, token in added.items() if token.special}
        self.tool_markers = {
            i: markers[token.content]
            for i, token in self._specials.items()
            if token.content in markers
        }
        self._guard = SpecialTokenGuard(
            [token.content for token in self._specials.values()], nonce or new_nonce()
        )
        self._literal, self._id_of_marker = literal_tokenizer(
            files.tokenizer, self._specials, self._guard.markers
        )
        self._bounds = bounds
        self._elsewhere = elsewhere
        self.first_work: list[Work] = []
        if elsewhere is not None:
            self.first_work.append((on_text, (elsewhere[1], "decoded", [[]], True)))

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        tool_parser: ToolParser = ToolParser.AUTO,
        reasoning_parser: ReasoningParser = ReasoningParser.AUTO,
        do: Do = at_once,
        generic_tools: bool = True,
        bounds: TemplateConfig = TemplateConfig(),  # noqa: B008 (frozen)
    ) -> TextModel:
        """Read a model directory.

        Raises:
          ModelError: a file is missing or broken, or lacks a marker of the reasoning.
        """
        source = TextSource(
            str(model_dir),
            tool_parser.value,
            reasoning_parser.value,
            generic_tools,
            astuple(bounds),
            new_nonce(),
        )
        return source.load(do)

    def _ask_template(self, *, generic_tools: bool) -> None:
        """Find out from the chat template how the model is told of tools."""
        self.tools, self._takes_system = ToolSupport.NONE, True
        if self._template is None:
            return
        if self._template.shows_tools():
            self.tools = ToolSupport.NATIVE
        elif generic_tools and self.tool_form is not HARMONY:
            self.tools, self.tool_form = ToolSupport.GENERIC, GENERIC
            self._takes_system = self._template.shows_system()

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._template is not None

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special_tokens: bool = True,
        param: str = PROMPT,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Return the ids of a text, or of what `render_chat` returned.

        Args:
          text: the prompt.
          add_special_tokens: begin (and end) as the model expects, with its bos token for example.
          parse_special_tokens: `<|im_end|>` in the text is that token. A prompt that its client
            wrote as a whole may be any sequence of ids anyway, and formats such as
            fill-in-the-middle need it. In a ChatPrompt only the template's own ever are.
          param: the request field to name in errors.
          max_tokens: the text is cut at its end to have no more, with the special tokens that are
            added before and behind it; None to leave it whole.

        Raises:
          RequestError: too long to fit, or as `Do`.
        """
        is_literal = isinstance(text, ChatPrompt) or not parse_special_tokens
        if max_tokens is not None:
            text = self._beginning(text)
        self._refuse_if_hopeless(text, param)
        source = text.marked if isinstance(text, ChatPrompt) else text
        [ids] = await self._encode([source], add_special_tokens, is_literal, max_tokens, param)
        return ids

    async def encode_each(
        self, texts: Sequence[str], *, params: Sequence[str], max_tokens: int | None = None
    ) -> list[tuple[int, ...]]:
        """Return the ids of each text, as `encode` does.

        Args:
          texts: of one request.
          params: what errors call each.
          max_tokens: of each.

        Raises:
          RequestError: one is too long to fit, or as `Do`.
        """
        if max_tokens is not None:
            texts = [self._beginning(text) for text in texts]
        for text, param in zip(texts, params, strict=True):
            self._refuse_if_hopeless(text, param)
        return await self._encode(texts, True, False, max_tokens, params[0] if params else PROMPT)

    async def _encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        is_literal: bool,
        max_tokens: int | None,
        param: str,
    ) -> list[tuple[int, ...]]:
        args = texts, add_special_tokens, is_literal, max_tokens
        is_quick = sum(map(len, texts)) <= INLINE_CHARS
        found = await self._do("encoded", *args, param=param, is_quick=is_quick)
        return [tuple(ids) for ids in found]

    def encoded(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        is_literal: bool,
        max_tokens: int | None,
    ) -> list[list[int]]:
        """Return the ids of texts, in place; see `encode`.

        Args:
          texts: as they are, or with markers.
          add_special_tokens: begin and end as the model expects.
          is_literal: special tokens are plain text, and markers are special tokens.
          max_tokens: of each; None to leave them whole.
        """
        tokenizer = self._literal if is_literal else self._tokenizer
        found = []
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens):
            ids = encoding.ids
            if max_tokens is not None and len(ids) > max_tokens:
                ids = _shortened(ids, encoding.special_tokens_mask, max_tokens)
            if is_literal:
                ids = [self._id_of_marker.get(i, i) for i in ids]
            found.append(ids)
        return found

    async def render_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> ChatPrompt:
        """Return a conversation as its prompt, for `encode(..., add_special_tokens=False)`.

        Raises:
          RequestError: the model has no template, the template refused the messages, they are too
            long to fit, or as `Do`.
        """
        if self._template is None:
            raise invalid_request(
                "this model has no chat template; send its own prompt format to /v1/completions",
                MESSAGES,
            )
        args = messages, add_generation_prompt, tools, template_kwargs
        is_linear = self._template.is_linear(has_tools=bool(tools))
        is_quick = is_linear and is_light(args)
        prompt = ChatPrompt(*await self._do("rendered", *args, param=MESSAGES, is_quick=is_quick))
        self._refuse_if_hopeless(prompt, MESSAGES)
        return prompt

    def rendered(
        self,
        messages: Conversation,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        template_kwargs: Mapping[str, object] | None,
    ) -> tuple[str, str]:
        """Return a conversation as it reads, and with markers, in place; see `render_chat`."""
        assert self._template is not None, "it was asked for"

        def refuse_beyond(so_far: str) -> None:
            self._refuse_beyond(self._guard.least_chars(so_far), MESSAGES)

        turns: Conversation = with_parsed_arguments(messages)
        try:
            if self.tools is ToolSupport.GENERIC:
                # Most conversations have neither tools nor calls, and are in words already.
                if tools or any("tool_calls" in one or one["role"] == "tool" for one in turns):
                    turns = with_tools_in_words(turns, tools or (), takes_system=self._takes_system)
                tools = None
            asked = self._guard.protect(turns)
            options: dict[str, Any] = {
                "add_generation_prompt": add_generation_prompt,
                "tools": self._guard.protect(tools),
                "template_kwargs": self._guard.protect(template_kwargs),
                "max_chars": self._bounds.max_bytes,
                "refuse": refuse_beyond,
                "refuse_after": self.max_model_len * self._vocabulary.longest_token_bytes,
            }
        except RecursionError:
            raise invalid_request("the messages or tools are nested too deeply", MESSAGES) from None
        if self._template.is_linear(has_tools=bool(tools)):
            rendered = self._template.render(asked, **options)
        else:
            work = partial(encoded_rendering, self._template, asked, **options)
            rendered = decoded_rendering(run_isolated(work, **asdict(self._bounds)))
        refuse_beyond(rendered)
        return self._guard.as_text(rendered), self._guard.with_markers(rendered)

    async def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, param: str = PROMPT
    ) -> str:
        """Return the text of ids that are all there.

        Raises:
          RequestError: as `Do`.
        """
        lists = [token_ids]
        [text] = await self.decode_each(lists, skip_special_tokens=skip_special_tokens, param=param)
        return text

    async def decode_each(
        self,
        lists: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = False,
        param: str = PROMPT,
    ) -> list[str]:
        """Return the text of each list of ids, special tokens included.

        Raises:
          RequestError: as `Do`.
        """
        is_quick = sum(map(len, lists)) <= INLINE_IDS
        args = lists, skip_special_tokens
        return list(await self._do("decoded", *args, param=param, is_quick=is_quick))

    def decoded(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Return the text of each list of ids, in place."""
        decode = self._tokenizer.decode
        return [str(decode(ids, skip_special_tokens=skip_special_tokens)) for ids in lists]

    async def _do(self, name: Method, *args: object, param: str, is_quick: bool = False) -> Any:  # noqa: ANN401 (what the method returns)
        """Return what a method of this makes of some values, in place or elsewhere."""
        if is_quick or self._elsewhere is None:
            return getattr(self, name)(*args)
        do, source = self._elsewhere
        return await do(on_text, source, name, *args, param=param)

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Return a decoder for a completion of `prompt_ids` that arrives id by id."""
        return Detokenizer(
            self._tokenizer,
            self._vocabulary.anchor_ids,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            vocabulary=self._vocabulary,
        )

    def token(self, token_id: int) -> TokenText:
        """Return what one token says by itself."""
        return self._vocabulary.token(token_id)

    def _beginning(self, text: str) -> str:
        """Return as much of a text as may fit whatever its tokens are."""
        num_bytes = self.max_model_len * self._vocabulary.longest_token_bytes
        try:
            return text[:num_bytes].encode()[:num_bytes].decode(errors="ignore")
        except UnicodeEncodeError:
            return text  # refused as it is

    def _refuse_if_hopeless(self, text: str, param: str) -> None:
        """Raise for text that cannot fit whatever its tokens are, before time is spent on it."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise invalid_request("the text has half of a surrogate pair", param) from None
        self._refuse_beyond(num_bytes, param)

    def _refuse_beyond(self, num_bytes: int, param: str) -> None:
        longest = self._vocabulary.longest_token_bytes
        if num_bytes > self.max_model_len * longest:
            raise invalid_request(
                f"{num_bytes} bytes of text cannot fit into a context of {self.max_model_len} "
                f"tokens of at most {longest} bytes each; shorten the text",
                param,
                "context_length_exceeded",
            )


def is_light(value: object) -> bool:
    """Whether something is small enough to be rendered at once."""
    left = INLINE_WEIGHT
    todo = [value]
    while todo and left >= ITEM_WEIGHT * len(todo):
        one = todo.pop()
        left -= ITEM_WEIGHT
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, list | tuple):
            todo += one
        elif isinstance(one, dict):
            todo += (*one, *one.values())
    return not todo and left >= 0


def _shortened(ids: Sequence[int], added: Sequence[int], most: int) -> list[int]:
    """Return the first ids of a text, with those added before and behind it.

    Args:
      ids: of the whole.
      added: 1 for those that are no part of the text.
      most: how many there may be; if there are more around the text, their first.
    """
    num_before = next((at for at, is_added in enumerate(added) if not is_added), len(ids))
    num_behind = next((at for at, is_added in enumerate(reversed(added)) if not is_added), 0)
    end = max(num_before, most - num_behind)
    return [*ids[:end], *ids[len(ids) - num_behind :]][:most]
