"""Keeps special tokens that a user wrote apart from those that the chat template wrote.

A template joins both into one string, and a tokenizer would take `<|im_end|>` in a user's message
for the end of that message. So every occurrence in user content is replaced by a placeholder before
rendering; afterwards the template's own become markers that no one can guess, and the placeholders
turn back into plain text.

The texts may be megabytes, and a search holds the interpreter's lock until it finds something. So
it goes through a window at a time, between which other threads have their turn.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING, Final, Self, TypeVar, cast

import trio
from tokenizers import AddedToken, Tokenizer

from triolet.config import ReasoningParser, ToolParser, TurnsConfig
from triolet.errors import RequestError, invalid_request, overloaded

from .detokenizer import Detokenizer, TokenText, Vocabulary
from .model_files import TextFiles, read_text_files
from .reasoning import find_reasoner
from .template import ChatTemplate
from .threads import FairLimiter, in_thread
from .tool_forms.generic import GENERIC, ToolSupport, with_tools_in_words
from .tool_forms.table import HARMONY, form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


_T = TypeVar("_T")

WINDOW_CHARS: Final = 64 * 1024
"""Searched at once, in about a millisecond."""
INLINE_CHARS: Final = 1024
"""Prompts of chats up to here are encoded at once, mostly in half a millisecond. A thread would
take as long to begin and to be heard. The slowest found take 6 ms: words of 99 letters that a
vocabulary of WordPiece lacks, and ligatures that NFKC makes 18 characters of. Other texts may come
in thousands with one request, so they go to the threads, in turns of tenants."""


class SpecialTokenGuard:
    """The special tokens of one tokenizer, and random names for them.

    Args:
      contents: the special tokens as text.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        # Letters and digits only: survives tojson, quoting and trimming in a template. 64 random
        # bits per process: a user cannot write one.
        self._nonce = secrets.token_hex(8)
        self._contents = tuple(contents)
        longest_first = sorted(self._contents, key=len, reverse=True)
        specials = "|".join(re.escape(content) for content in longest_first)
        # An empty alternative would match everywhere.
        self._special = re.compile(specials or r"(?!)")
        self._rendered = re.compile(f"({specials or '(?!)'})|x{self._nonce}u([0-9]+)x")
        self._index = {content: i for i, content in enumerate(self._contents)}
        self._longest = max(
            map(len, (*self._contents, f"x{self._nonce}u{len(self._contents)}x")), default=0
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """The names that stand for the special tokens, in the order of `contents`."""
        return tuple(f"x{self._nonce}t{i}x" for i in range(len(self._contents)))

    def protect(self, value: _T) -> _T:
        """Return `value` with placeholders for special tokens in all its strings, at any depth."""
        return cast("_T", self._protected(value))

    def with_markers(self, rendered: str) -> str:
        """Return a rendered template for a tokenizer that knows the markers as tokens."""
        return self._replaced(self._rendered, self._marker_or_text, rendered)

    def as_text(self, rendered: str) -> str:
        """Return a rendered template as a person would read it."""
        return self._replaced(self._rendered, lambda m: m[1] or self._contents[int(m[2])], rendered)

    def least_chars(self, rendered: str) -> int:
        """Return what `as_text` has at least, without the time that it takes."""
        num_placeholders = rendered.count(f"x{self._nonce}u")
        return len(rendered) - num_placeholders * self._longest

    def _protected(self, value: object) -> object:
        if isinstance(value, str):
            return self._replaced(self._special, self._placeholder, value)
        if isinstance(value, dict):
            return {self._protected(k): self._protected(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._protected(item) for item in value]
        return value

    def _replaced(
        self, pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str
    ) -> str:
        """Return `pattern.sub(replace, text)`, looked for through one window after the other."""
        pieces: list[str] = []
        copied = begin = 0
        while begin < len(text):
            end = begin + WINDOW_CHARS
            # Whatever begins in the window is seen as a whole.
            for match in pattern.finditer(text, begin, end + self._longest):
                if match.start() >= end:
                    break
                pieces += text[copied : match.start()], replace(match)
                copied = match.end()
            begin = max(end, copied)
        return "".join((*pieces, text[copied:])) if copied else text

    def _placeholder(self, match: re.Match[str]) -> str:
        return f"x{self._nonce}u{self._index[match[0]]}x"

    def _marker_or_text(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"x{self._nonce}t{self._index[match[1]]}x"
        return self._contents[int(match[2])]


PROMPT = "prompt"
MESSAGES = "messages"
WAITING_TEXTS = "texts wait for the tokenizer"


def text_threads(count: int, turns: TurnsConfig) -> FairLimiter:
    """Return the threads for long texts, with their lines.

    Args:
      count: texts worked on at once.
      turns: bounds of the lines.
    """
    return FairLimiter(count, turns, WAITING_TEXTS)


class ChatPrompt(str):
    """A rendered conversation as it reads, which still knows the special tokens that the template
    wrote from those that a user wrote. Whatever else makes a string of it, a slice for example, has
    forgotten the difference: encoded, it has the special tokens that users wrote.

    Attributes:
      marked: the same with markers for the template's special tokens.
    """

    __slots__ = ("marked",)

    marked: str

    def __new__(cls, text: str, marked: str) -> Self:
        prompt = super().__new__(cls, text)
        prompt.marked = marked
        return prompt

    def up_to(self, mark: str) -> ChatPrompt | None:
        """Return what stands before a mark; None unless it is there exactly once."""
        before, *others = self.split(mark)
        marked_before, *_ = self.marked.split(mark)
        return ChatPrompt(before, marked_before) if len(others) == 1 else None


class TextModel:
    """The textual side of the served model.

    Args:
      files: what its directory says.
      tokenize_threads: texts worked on at once.
      tokenize_timeout_s: how long a request may wait for its text.
      tool_parser: how the model writes calls of tools.
      turns: bounds of the lines for the threads.
      reasoning_parser: how the model's reasoning is told apart.
      threads: for long texts, where several models share them; None for `tokenize_threads` of its
        own.
      generic_tools: where the chat template shows no tools, the system prompt does.

    Attributes:
      eos_token_ids: every id that ends a sequence.
      max_model_len: positions that the model was made for.
      tools: how the model is told of them.
      tool_form: how the model writes calls of tools.
      reasoner: how the model reasons; None if it does not.
      tool_tokens: ids of the markers of that form that are single tokens.
      tool_markers: special tokens among them, and how the text of an answer shows each.
      vocab_size: ids that the tokenizer knows are below this.
      turns: of the texts that wait for a thread.
    """

    def __init__(
        self,
        files: TextFiles,
        *,
        tokenize_threads: int,
        tokenize_timeout_s: float,
        tool_parser: ToolParser = ToolParser.AUTO,
        turns: TurnsConfig = TurnsConfig(),  # noqa: B008 (frozen)
        reasoning_parser: ReasoningParser = ReasoningParser.AUTO,
        threads: FairLimiter | None = None,
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
        self._ask_template(tokenize_timeout_s, generic_tools=generic_tools)
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
        self._guard = SpecialTokenGuard([token.content for token in self._specials.values()])
        self._literal, self._id_of_marker = _literal_tokenizer(
            files.tokenizer, self._specials, self._guard.markers
        )
        self._limiter = threads or text_threads(tokenize_threads, turns)
        self.turns = self._limiter.turns
        self._timeout_s = tokenize_timeout_s

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        tokenize_threads: int = 2,
        tokenize_timeout_s: float = 10.0,
        tool_parser: ToolParser = ToolParser.AUTO,
        turns: TurnsConfig = TurnsConfig(),  # noqa: B008 (frozen)
        reasoning_parser: ReasoningParser = ReasoningParser.AUTO,
        threads: FairLimiter | None = None,
        generic_tools: bool = True,
    ) -> TextModel:
        """Read a model directory.

        Raises:
          ModelError: a file is missing or broken, or lacks a marker of the reasoning.
        """
        return cls(
            read_text_files(model_dir),
            tokenize_threads=tokenize_threads,
            tokenize_timeout_s=tokenize_timeout_s,
            tool_parser=tool_parser,
            turns=turns,
            reasoning_parser=reasoning_parser,
            threads=threads,
            generic_tools=generic_tools,
        )

    def _ask_template(self, timeout_s: float, *, generic_tools: bool) -> None:
        """Find out from the chat template how the model is told of tools."""
        give_up = time.monotonic() + timeout_s

        def check() -> None:
            if time.monotonic() > give_up:
                raise invalid_request("the chat template takes too long", MESSAGES)

        self.tools, self._takes_system = ToolSupport.NONE, True
        if self._template is None:
            return
        if self._template.shows_tools(check):
            self.tools = ToolSupport.NATIVE
        elif generic_tools and self.tool_form is not HARMONY:
            self.tools, self.tool_form = ToolSupport.GENERIC, GENERIC
            self._takes_system = self._template.shows_system(check)

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
          RequestError: too long to fit, or the threads did not get to it in time.
        """
        if max_tokens is not None:
            text = self._beginning(text)
        self._refuse_if_hopeless(text, param)
        is_literal = isinstance(text, ChatPrompt) or not parse_special_tokens
        tokenizer = self._literal if is_literal else self._tokenizer
        source = text.marked if isinstance(text, ChatPrompt) else text

        def work() -> tuple[int, ...]:
            # Not `encode`: that holds the interpreter's lock, for a second per 0.5 MB, in which no
            # stream gets on.
            (encoding,) = tokenizer.encode_batch_fast(
                [source], add_special_tokens=add_special_tokens
            )
            ids = encoding.ids
            if max_tokens is not None and len(ids) > max_tokens:
                ids = _shortened(ids, encoding.special_tokens_mask, max_tokens)
            return tuple(self._id_of_marker.get(i, i) for i in ids) if is_literal else tuple(ids)

        if isinstance(text, ChatPrompt) and len(source) <= INLINE_CHARS:
            return work()
        return await self._in_thread(work, param)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> ChatPrompt:
        """Return a conversation as its prompt, for `encode(..., add_special_tokens=False)`.

        Raises:
          RequestError: the model has no template, the template refused the messages, they are too
            long to fit, or the threads did not get to it in time.
        """
        template = self._template
        if template is None:
            raise invalid_request(
                "this model has no chat template; send its own prompt format to /v1/completions",
                MESSAGES,
            )

        def refuse_beyond(so_far: str) -> None:
            self._refuse_beyond(self._guard.least_chars(so_far), MESSAGES)

        def work() -> ChatPrompt:
            turns, listed = messages, tools
            if self.tools is ToolSupport.GENERIC:
                listed = None
                turns = with_tools_in_words(turns, tools or (), takes_system=self._takes_system)
            rendered = template.render(
                self._guard.protect(turns),
                add_generation_prompt=add_generation_prompt,
                tools=self._guard.protect(listed),
                template_kwargs=self._guard.protect(template_kwargs),
                # Ends the loop of a template when its request has ended.
                check=trio.from_thread.check_cancelled,
                refuse=refuse_beyond,
                refuse_after=self.max_model_len * self._vocabulary.longest_token_bytes,
            )
            refuse_beyond(rendered)
            return ChatPrompt(self._guard.as_text(rendered), self._guard.with_markers(rendered))

        prompt = await self._in_thread(work, MESSAGES)
        self._refuse_if_hopeless(prompt, MESSAGES)
        return prompt

    async def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, param: str = PROMPT
    ) -> str:
        """Return the text of ids that are all there.

        Raises:
          RequestError: the threads did not get to it in time.
        """

        def work() -> str:
            # A batch, as above, because it lets others go on.
            (text,) = self._tokenizer.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
            return str(text)

        return await self._in_thread(work, param)

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each id by itself, special tokens included.

        Raises:
          RequestError: the threads did not get to it in time.
        """

        def work() -> list[str]:
            decode = self._tokenizer.decode
            return [str(decode([i], skip_special_tokens=False)) for i in token_ids]

        return await self._in_thread(work, PROMPT)

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Return a decoder for a completion of `prompt_ids` that arrives id by id."""
        return Detokenizer(
            self._tokenizer,
            self._vocabulary.anchor_ids,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            plain_text=self._vocabulary.plain_text,
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

    async def _in_thread(self, work: Callable[[], _T], param: str) -> _T:
        has_begun = False

        def tracked() -> _T:
            nonlocal has_begun
            has_begun = True
            return work()

        with trio.move_on_after(self._timeout_s):
            # An abandoned thread keeps its place in the limiter until it is done, so there are
            # never more threads than that.
            return await in_thread(tracked, self._limiter, abandon_on_cancel=True)
        raise self._timed_out(has_begun, param)

    def _timed_out(self, has_begun: bool, param: str) -> RequestError:
        if has_begun:
            return invalid_request(
                f"this text takes longer than {self._timeout_s:g} s to tokenise; shorten it", param
            )
        return overloaded(f"too many {WAITING_TEXTS}", retry_after_s=1.0)


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


def _literal_tokenizer(
    tokenizer: Tokenizer, specials: Mapping[int, AddedToken], markers: Sequence[str]
) -> tuple[Tokenizer, dict[int, int]]:
    """Return a copy to which special tokens are plain text and markers are what they stand for.

    Returns:
      The copy, and the special token's id for each marker's id.
    """
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.add_tokens(
        [
            AddedToken(marker, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            for marker, token in zip(markers, specials.values(), strict=True)
        ]
    )
    # Hides those that are special, which the markers are not.
    literal.encode_special_tokens = True
    id_of_marker = {}
    for marker, special_id in zip(markers, specials, strict=True):
        marker_id = literal.token_to_id(marker)
        assert marker_id is not None, "the marker was added above"
        id_of_marker[marker_id] = special_id
    return literal, id_of_marker
