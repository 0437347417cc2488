"""`TextModel`: a model's tokenizer, chat template, grammars and tool call format. Encodes texts and
conversations to token ids, and decodes ids to text.

Slow work runs in text processes (processes.py) that have loaded the same model.
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
"""Turns in the format of chat templates. Arguments of calls may be JSON, which is parsed where they
are rendered, because it may be megabytes."""
Method: TypeAlias = Literal["encoded", "rendered", "decoded"]
"""The methods of `TextModel` that a text process runs."""

MAX_MODELS: Final = 8
"""Maximum number of models that a text process caches, each of some tens of megabytes; the least
recent is dropped."""
INLINE_CHARS: Final = 1024
"""Texts up to this size, all of a request together, are encoded in place, mostly in half a
millisecond, which is as long as asking a text process. The slowest found take 6 ms: 99-letter words
unknown to a WordPiece vocabulary, and ligatures that NFKC expands to 18 characters."""
INLINE_IDS: Final = 1024
"""Lists up to this length are decoded in place."""
INLINE_WEIGHT: Final = 16 * 1024
"""Conversations up to this weight are rendered in place, in some 0.3 ms: their characters, plus
ITEM_WEIGHT for each message, field and tool."""
ITEM_WEIGHT: Final = 16


PROMPT = "prompt"
MESSAGES = "messages"


def new_nonce() -> str:
    """Return 64 random bits, which a user cannot guess."""
    return secrets.token_hex(8)


class TextSource(NamedTuple):
    """Everything a process needs to load a model's `TextModel` and share its markers.

    Attributes:
      model_dir: the model's directory.
      tool_parser: a ToolParser's value: the format of tool calls.
      reasoning_parser: a ReasoningParser's value: the format of reasoning.
      generic_tools: whether to describe tools in the system prompt if the chat template shows none.
      bounds: a TemplateConfig's values.
      nonce: part of the special tokens' names, the same in all processes of one server.
    """

    model_dir: str
    tool_parser: str
    reasoning_parser: str
    generic_tools: bool
    bounds: tuple[float, int, int]
    nonce: str

    def load(self, do: Do = at_once) -> TextModel:
        """Load the model directory.

        Args:
          do: runs slow work.

        Raises:
          ModelError: a file is missing or broken, or the tokenizer lacks a reasoning marker.
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
    """Return a `TextModel`, cached in this process."""
    return source.load()


@job
def on_text(source: Sequence[Any], name: Method, *args: object) -> object:
    """Call a method of a model's `TextModel`.

    Args:
      source: a TextSource's values.
      name: the method.
      args: its arguments.
    """
    assert name in get_args(Method), "not an allowed method"
    if not isinstance(source, TextSource):
        source = TextSource._make(tuple(one) if isinstance(one, list) else one for one in source)
    return getattr(text_of(source), name)(*args)


def with_parsed_arguments(messages: Conversation) -> list[dict[str, Any]]:
    """Return a conversation with the arguments of calls as objects where they are JSON objects."""
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
    """A served model's text processing.

    Args:
      files: the files of its directory.
      tool_parser: the format of tool calls.
      reasoning_parser: the format of reasoning.
      nonce: see TextSource; None for a new one.
      elsewhere: runs slow work in processes that load the model from the source; None to run
        everything in place.
      generic_tools: whether to describe tools in the system prompt if the chat template shows none.
      bounds: limits of templates that may be slow.

    Attributes:
      eos_token_ids: all ids that end a sequence.
      max_model_len: number of positions that the model supports.
      tools: how tools are shown to the model.
      tool_form: the format of tool calls.
      reasoner: how the model reasons; None if it does not.
      tool_tokens: ids of the format's markers that are single tokens.
      tool_markers: special tokens among them, with their form in an answer's text.
      vocab_size: upper bound (exclusive) of the tokenizer's ids.
      first_work: the job that makes a text process load the model.
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
        """Load a model directory.

        Raises:
          ModelError: a file is missing or broken, or the tokenizer lacks a reasoning marker.
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
        """Determine from the chat template how tools are shown to the model."""
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
        """Return the ids of a text, or of the result of `render_chat`.

        Args:
          text: the prompt.
          add_special_tokens: whether to add the model's start (and end) tokens, such as bos.
          parse_special_tokens: whether `<|im_end|>` in the text becomes that token. A client that
            writes the whole prompt can send any ids anyway, and formats such as fill-in-the-middle
            need it. In a ChatPrompt, only the template's special tokens do.
          param: the request field that errors name.
          max_tokens: truncate the end of the text to this length, including added special tokens;
            None for no truncation.

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
          texts: texts of one request.
          params: the request field of each, for errors.
          max_tokens: limit of each.

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
          texts: plain texts, or texts with markers.
          add_special_tokens: whether to add the model's start and end tokens.
          is_literal: whether special tokens are plain text, and markers are special tokens.
          max_tokens: limit of each; None for no truncation.
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
        """Return the prompt of a conversation, for `encode(..., add_special_tokens=False)`.

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
        """Render a conversation in place, as readable text and with markers; see `render_chat`."""
        assert self._template is not None, "the model has no chat template"

        def refuse_beyond(so_far: str) -> None:
            self._refuse_beyond(self._guard.least_chars(so_far), MESSAGES)

        turns: Conversation = with_parsed_arguments(messages)
        try:
            if self.tools is ToolSupport.GENERIC:
                # Most conversations have neither tools nor calls, and need no conversion.
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
        """Return the text of a complete list of ids.

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
        """Return the text of each list of ids, with special tokens by default.

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
        """Call a method of this model, in place or in a text process."""
        if is_quick or self._elsewhere is None:
            return getattr(self, name)(*args)
        do, source = self._elsewhere
        return await do(on_text, source, name, *args, param=param)

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Return an incremental detokenizer for a completion of `prompt_ids`."""
        return Detokenizer(
            self._tokenizer,
            self._vocabulary.anchor_ids,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            vocabulary=self._vocabulary,
        )

    def token(self, token_id: int) -> TokenText:
        """Return the text of one token alone."""
        return self._vocabulary.token(token_id)

    def _beginning(self, text: str) -> str:
        """Return the longest prefix of a text that might fit, whatever its tokens."""
        num_bytes = self.max_model_len * self._vocabulary.longest_token_bytes
        try:
            return text[:num_bytes].encode()[:num_bytes].decode(errors="ignore")
        except UnicodeEncodeError:
            return text  # will be refused

    def _refuse_if_hopeless(self, text: str, param: str) -> None:
        """Raise RequestError for text that cannot fit, whatever its tokens, before spending time on
        it."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise invalid_request("the text contains half of a surrogate pair", param) from None
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
    """Whether a conversation is small enough to be rendered in place."""
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
    """Return the ids of a truncated text, with the special tokens added before and after it.

    Args:
      ids: ids of the whole text.
      added: 1 for ids that are not part of the text.
      most: maximum length; if the added ids alone exceed it, only the first of them are returned.
    """
    num_before = next((at for at, is_added in enumerate(added) if not is_added), len(ids))
    num_behind = next((at for at, is_added in enumerate(reversed(added)) if not is_added), 0)
    end = max(num_before, most - num_behind)
    return [*ids[:end], *ids[len(ids) - num_behind :]][:most]
