"""A scripted fleet and a text model for tests of the API. They run in this process, without
workers.

The text model's tokens are UTF-8 bytes, so texts can be read from their ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import trio
from msgspec.structs import replace

from server.api.served_models import ModelTable, ServedModel
from server.api.services import Services
from server.contract.generation import (
    CancelReason,
    Delta,
    Failed,
    Finished,
    FinishReason,
    TokenLogprob,
    Usage,
)
from server.contract.output_stream import OutputStream
from server.contract.request_events import RequestEvents
from server.scheduling.status import OverloadStatus
from server.text.model_files import SamplingDefaults
from server.text.special_tokens import ChatPrompt
from server.text.tokenizer import with_parsed_arguments
from server.text.tool_forms.generic import ToolSupport
from server.text.tool_forms.tool_calls import HERMES
from transport.frames import Capacity, Load
from triolet.audit import FleetAudit, ServerAudit
from triolet.errors import RequestError, invalid_request
from triolet.ids import Role

from .request_lives import ChargedEvents

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.contract.generation import Event, GenerationRequest, OutputReader
    from server.metrics.metrics import Metrics
    from server.scheduling.admission import AdmissionAsk
    from server.scheduling.links import Links
    from server.tenants.quotas import Quotas
    from server.text.grammars import Grammars
    from server.text.tokenizer import Conversation, TextModel
    from server.text.tool_forms.reasoning import Reasoner
    from server.text.tool_forms.tool_calls import ToolForm
    from transport.control_protocol import ModelState
    from triolet.config import ServerConfig
    from triolet.sampling import Grammar
    from triolet.service_class import Scheduling

PATIENCE_S = 60.0
"""Nothing here takes a second; the machine may have other things to do."""
MAX_MODEL_LEN = 4096
CAPACITY = Capacity(
    num_blocks=256,
    block_size=16,
    bytes_per_block=1024,
    max_num_seqs=8,
    max_model_len=MAX_MODEL_LEN,
)


def delta(text: str, *, logprobs: bool = False) -> Delta:
    """Return a delta with the bytes of its text as tokens."""
    raw = text.encode()
    if not logprobs:
        return Delta(text, tuple(raw))
    pieces = [(byte, chr(byte), bytes([byte]), -0.5) for byte in raw]
    scored = tuple(TokenLogprob(*piece, top=(piece,)) for piece in pieces)
    return Delta(text, tuple(raw), scored)


class FakeGeneration:
    """Hands out what a test pushes.

    Attributes:
      cancelled: reasons, in the order of the calls.
      was_cancelled: set by the first.
      was_read: set once events were taken.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._events: list[Event] = []
        self._reader: OutputReader | None = None
        self._index = 0
        self._num_tokens = 0
        self.cancelled: list[CancelReason] = []
        self.was_cancelled = trio.Event()
        self.was_read = trio.Event()

    @property
    def request(self) -> GenerationRequest:
        return self._request

    @property
    def usage(self) -> Usage:
        return Usage(len(self._request.prompt_ids), self._num_tokens)

    @property
    def has_begun(self) -> bool:
        """Whether something was pushed."""
        return bool(self._num_tokens)

    @property
    def num_unread(self) -> int:
        """Events that the reader has not taken."""
        return len(self._events)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    async def cancellations(self) -> list[CancelReason]:
        """Wait for the first cancel; return the reasons."""
        with trio.fail_after(PATIENCE_S):
            await self.was_cancelled.wait()
        return self.cancelled

    def attach(self, reader: OutputReader, index: int) -> None:
        self._reader, self._index = reader, index
        if self._events:
            reader.note_filled(index)

    def push(self, *events: Event) -> None:
        """Add events for the reader."""
        for event in events:
            if isinstance(event, Delta):
                self._num_tokens += len(event.token_ids)
        was_empty = not self._events
        self._events.extend(events)
        if was_empty and self._events and self._reader is not None:
            self._reader.note_filled(self._index)
        if any(not isinstance(event, Delta) for event in events):
            self._reader = None  # it holds this

    def say(self, *texts: str) -> None:
        """Push texts."""
        for text in texts:
            self.push(delta(text, logprobs=self._request.sampling.logprobs is not None))

    def finish(self, reason: FinishReason = FinishReason.STOP) -> None:
        """Push the good end."""
        self.push(Finished(reason, self.usage, fingerprint="tiny"))

    def fail(self, error: RequestError) -> None:
        """Push the bad end."""
        self.push(Failed(error, self.usage))

    def take_now(self) -> Sequence[Event]:
        events, self._events = self._events, []
        self.was_read.set()
        return events

    def cancel(self, reason: CancelReason) -> None:
        self.cancelled.append(reason)
        if not self.was_cancelled.is_set():
            self.was_cancelled.set()
            self.fail(RequestError(f"ended: {reason}", status=503, code=reason.value))


@dataclass
class FakeWorker:
    role: Role
    name: str
    state: str = "alive"
    capacity: Capacity | None = CAPACITY
    load: Load = field(default_factory=Load)
    breaker: str = "closed"
    share: float = 1.0
    fingerprint: str = "tiny"
    trouble: str = ""
    address: str = "ipc:///w"
    labels: Mapping[str, str] = field(default_factory=lambda: {"zone": "eu-1a"})


class FakeAdmission:
    """Lets everybody in.

    Attributes:
      cap: of answers' tokens; None for none.
      refuse_with: raised while it is set.
      keys: of the requests.
    """

    level = 1

    def __init__(self) -> None:
        self.cap: int | None = None
        self.refuse_with: RequestError | None = None
        self.keys: list[int] = []

    def would_refuse(self, ask: AdmissionAsk, now: float) -> bool:
        return self.refuse_with is not None

    def admit(self, ask: AdmissionAsk, now: float) -> None:
        self.keys.append(ask.key)
        if self.refuse_with is not None:
            raise self.refuse_with

    def max_tokens(self, scheduling: Scheduling, prompt_tokens: int) -> int | None:
        return self.cap


@dataclass
class FakeStatus:
    workers: list[FakeWorker]
    queued: int = 0
    running: int = 0
    max_model_len: int = MAX_MODEL_LEN
    retries_left: float = 20.0
    quarantined: int = 0
    overload: OverloadStatus = field(default_factory=OverloadStatus)
    queued_by_class: Mapping[str, int] = field(default_factory=dict)
    queue_lag_tokens: float = 0.0
    is_draining: bool = False
    told: ModelState | None = None
    is_coming: bool = False

    @property
    def is_ready(self) -> bool:
        return {w.role for w in self.workers if w.state == "alive"} == {Role.PREFILL, Role.DECODE}


def answer_hello(generation: FakeGeneration) -> None:
    """The script of a fleet that was told nothing else."""
    generation.say("Hello", " there")
    generation.finish()


def saying(
    *texts: str,
    reason: FinishReason = FinishReason.STOP,
    stop: str | None = None,
    error: RequestError | None = None,
) -> Callable[[FakeGeneration], None]:
    """Return a script that says some texts and then ends, well or with an error."""

    def script(generation: FakeGeneration) -> None:
        generation.say(*texts)
        end = Finished(reason, generation.usage, stop_string=stop)
        generation.push(end if error is None else Failed(error, generation.usage))

    return script


class FakeRun:
    """Vectors that are there at once."""

    has_begun = True

    def __init__(self, count: int) -> None:
        self._count = count
        self.inputs: Sequence[object] = range(count)

    async def vectors(self) -> Sequence[bytes]:
        await trio.lowlevel.checkpoint()
        return [struct.pack("<2f", 0.6, 0.8)] * self._count

    def cancel(self, reason: CancelReason) -> None:
        """Nothing runs."""


class FakeFleet:
    """Begins generations that follow a script.

    Attributes:
      admission: refuses early.
      script: what happens to a new generation; nothing, if a test drives it by hand.
      generations: all of them, in order.
      inputs: all that vectors were asked for, in order.
      refuse_with: raised by submit while it is set.
      refusals: how often that was.
      accounts: what an audit tells.
      running: tenants of the requests that are said to run.
      events: of its requests.
    """

    def __init__(self, script: Callable[[FakeGeneration], None] = answer_hello) -> None:
        self.script = script
        self.events = RequestEvents()
        self.generations: list[FakeGeneration] = []
        self.inputs: list[GenerationRequest] = []
        self.admission = FakeAdmission()
        self.refuse_with: RequestError | None = None
        self.refusals = 0
        self.accounts = ServerAudit("server", "1", 3, 2, {"overloaded": 1}, {"stop": 2}, 0, 0, 0)
        self.running: list[str] = []
        self._submitted = trio.Event()
        self._status = FakeStatus(
            [FakeWorker(Role.PREFILL, "prefill-0"), FakeWorker(Role.DECODE, "decode-0")]
        )

    def submit(self, *requests: GenerationRequest) -> OutputStream:
        return OutputStream([self.begin(request) for request in requests])

    def begin(self, request: GenerationRequest) -> FakeGeneration:
        if self.refuse_with is not None:
            self.refusals += 1
            raise self.refuse_with
        generation = FakeGeneration(request)
        self.generations.append(generation)
        self.script(generation)
        self._submitted.set()
        return generation

    def embed(self, requests: Sequence[GenerationRequest]) -> FakeRun:
        self.inputs += requests
        return FakeRun(len(requests))

    @property
    def max_model_len(self) -> int:
        return self._status.max_model_len

    def in_flight(self, tenant: str | None = None) -> int:
        return len(self.running) if tenant is None else self.running.count(tenant)

    def status(self) -> FakeStatus:
        return self._status

    async def audit(self, connections: int = 0) -> FleetAudit:
        await trio.lowlevel.checkpoint()
        server = replace(self.accounts, connections=connections)
        return FleetAudit(grace_s=2.0, server=server, workers=())

    async def nth(self, index: int) -> FakeGeneration:
        """Wait for a generation by its number."""
        while len(self.generations) <= index:
            self._submitted = trio.Event()
            await self._submitted.wait()
        return self.generations[index]


class ChargingFleet(FakeFleet):
    """Tells what is accepted and what has ended, as the real one does."""

    def __init__(self, quotas: Quotas) -> None:
        super().__init__()
        self.events = self.charged = ChargedEvents(quotas)
        self.used = 0

    def begin(self, request: GenerationRequest) -> FakeGeneration:
        generation = super().begin(request)
        self.charged.accept(request.request_id)
        if self.script is answer_hello:
            self.end(generation)
        return generation

    def embed(self, requests: Sequence[GenerationRequest]) -> FakeRun:
        for request in requests:
            self.charged.accept(request.request_id)
            self.charged.end(request.request_id, Usage(0, 0))
            self.used += len(request.prompt_ids)
        return super().embed(requests)

    def end(self, generation: FakeGeneration, *, is_begun: bool = True) -> None:
        """Tell what one used: its prompt counts with the first of several choices."""
        request, usage = generation.request, generation.usage
        self.charged.end(request.request_id, usage, is_begun=is_begun)
        if is_begun:
            prompt = 0 if request.origin_id else usage.prompt_tokens
            self.used += prompt + usage.completion_tokens


def by_hand(generation: FakeGeneration) -> None:
    """A script that leaves everything to the test."""


class FakeGrammars:
    """Finds every grammar good but those in `refused`.

    Attributes:
      checked: what it was asked for.
      refused: texts.
    """

    def __init__(self) -> None:
        self.checked: list[Grammar] = []
        self.refused: set[str] = set()

    async def check(self, grammar: Grammar, param: str) -> None:
        self.checked.append(grammar)
        await trio.lowlevel.checkpoint()
        if grammar.text in self.refused:
            raise invalid_request("cannot be used", param)


class FakeText:
    """Bytes as tokens; a template that a person can read."""

    vocab_size = 256
    tool_form: ToolForm = HERMES
    reasoner: Reasoner | None = None
    tool_tokens: Mapping[str, int] = MappingProxyType({})
    tool_markers: Mapping[int, str] = MappingProxyType({})
    tools = ToolSupport.NATIVE
    has_chat_template = True

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        if "\0" in text:
            raise invalid_request("a NUL cannot be encoded", param)
        return tuple(text.encode()[:max_tokens])

    async def render_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> ChatPrompt:
        turns = "".join(f"tool {tool['function']['name']}\n" for tool in tools or ())
        turns += "".join(self._turn(message) for message in with_parsed_arguments(messages))
        opening = "assistant:" if add_generation_prompt else ""
        text = turns + opening + "".join(f" {name}" for name in template_kwargs or ())
        return ChatPrompt(text, text)

    def _turn(self, message: Mapping[str, Any]) -> str:
        calls = "".join(
            f" {call['id']}={call['function']['name']}({call['function']['arguments']})"
            for call in message.get("tool_calls", ())
        )
        of_call = f" of {message['tool_call_id']}" if "tool_call_id" in message else ""
        return f"{message['role']}{of_call}: {message['content']}{calls}\n"

    async def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, param: str = "prompt"
    ) -> str:
        return bytes(token_ids).decode(errors="replace")

    async def encode_each(
        self, texts: Sequence[str], *, params: Sequence[str], max_tokens: int | None = None
    ) -> list[tuple[int, ...]]:
        return [
            await self.encode(text, param=param, max_tokens=max_tokens)
            for text, param in zip(texts, params, strict=True)
        ]

    async def decode_each(self, lists: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(ids).decode(errors="replace") for ids in lists]


def fake_services(
    config: ServerConfig,
    fleet: FakeFleet,
    metrics: Metrics,
    grammars: FakeGrammars | None = None,
    text: FakeText | TextModel | None = None,
    defaults: SamplingDefaults | None = None,
    others: Sequence[ServedModel] = (),
    **parts: Any,  # noqa: ANN401 (fields of Services)
) -> Services:
    """Return the parts of a server with a fake fleet, text model and grammars."""
    model = fake_model(config, fleet, grammars, text, defaults)
    return Services(config, ModelTable([model, *others]), metrics, **parts)


def fake_model(
    config: ServerConfig,
    fleet: FakeFleet,
    grammars: FakeGrammars | None = None,
    text: FakeText | TextModel | None = None,
    defaults: SamplingDefaults | None = None,
) -> ServedModel:
    """Return a model with a fake fleet, text model and grammars."""
    return ServedModel(
        config,
        cast("Links", fleet),
        cast("TextModel", text or FakeText()),
        cast("Grammars", grammars or FakeGrammars()),
        defaults or SamplingDefaults(),
    )
