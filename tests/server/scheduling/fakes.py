"""Fake workers without a model for tests of the scheduler: they follow the protocol exactly and
"compute" a fixed text.

The token at a position depends only on the request's seed and that position, as in the real engine,
so any attempt can continue another. No Trio here; fake_processes.py puts them on a network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from server.contract.generation import GenerationRequest
from tests.server.tiny_text import EOS_ID
from transport.frames import (
    PROTOCOL_VERSION,
    AnyFrame,
    Audit,
    Audited,
    Capacity,
    CreditRow,
    Embed,
    Embedded,
    End,
    Ended,
    EndReason,
    FirstToken,
    Grant,
    Load,
    Peer,
    Prefill,
    Refuse,
    RefuseReason,
    Reserve,
    ServerHeartbeat,
    TokenCredit,
    TokenRow,
    Tokens,
    Welcome,
    WorkerHeartbeat,
)
from transport.tokens import pack_tokens, unpack_tokens
from triolet.config import LinkConfig, ServerConfig
from triolet.ids import AttemptKey, Role
from triolet.sampling import SamplingParams
from triolet.service_class import DEFAULT_SCHEDULING, Scheduling

from .accounts import decode_account, prefill_account

BLOCK_SIZE = 4
LINK = LinkConfig()
STORY = "Der Zug fährt über die Brücke 🚂 und 日本 hört «es» nicht. "
"""The text that every fake model generates, starting at the byte that the seed selects."""


def token_at(seed: int, position: int) -> int:
    """Return the fake model's token at a completion position."""
    story = STORY.encode()
    return story[(seed + position) % len(story)]


def completion_ids(seed: int, max_tokens: int, end_at: int | None = None) -> list[int]:
    """Return a request's whole completion, which must be the same whatever faults occur."""
    ids = [token_at(seed, position) for position in range(max_tokens)]
    return ids if end_at is None or end_at >= max_tokens else [*ids[:end_at], EOS_ID]


def server_config(**changes: object) -> ServerConfig:
    """Return a config with one worker of each role."""
    settings: dict[str, object] = {
        "model_dir": "tiny",
        "model_name": "tiny",
        "prefill_addresses": ("mem://prefill-0",),
        "decode_addresses": ("mem://decode-0",),
        "link": LINK,
        **changes,
    }
    return ServerConfig(**settings)  # type: ignore[arg-type]


def make_request(
    number: int = 1,
    *,
    prompt: str = "Hallo",
    max_tokens: int = 16,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    deadline_s: float = 600.0,
    priority: int = 0,
    logprobs: int | None = None,
    scheduling: Scheduling = DEFAULT_SCHEDULING,
) -> GenerationRequest:
    """Return a request with its number as its id."""
    return GenerationRequest(
        request_id=number.to_bytes(16, "big"),
        prompt_ids=tuple(prompt.encode()),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=logprobs),
        deadline_s=deadline_s,
        stop=stop,
        priority=priority,
        scheduling=scheduling,
    )


@dataclass
class FakeRow:
    """An attempt on the fake decode worker."""

    reserve: Reserve
    position: int
    allowed: int
    num_blocks: int
    is_ready: bool = False


@dataclass
class FakeDecode:
    """A decode worker.

    Attributes:
      end_at: position at which the model generates its end token; None for never.
      refusal: answer to every RESERVE, if set.
      held_blocks: cached blocks that it reports for every prompt.
      labels: its labels.
      rows: its leases.
      server: the server that holds them, as named in leases.
      computed: tokens computed after the replay, per attempt.
      forsaken: unsent ENDED frames of forks after the end of their origin.
    """

    name: str = "decode-0"
    epoch: int = 1
    num_blocks: int = 1000
    row_credit: int = 8
    fingerprint: str = "tiny/f32"
    end_at: int | None = None
    refusal: RefuseReason | None = None
    held_blocks: int = 0
    is_draining: bool = False
    role: Role = Role.DECODE
    labels: dict[str, str] = field(default_factory=dict)
    rows: dict[AttemptKey, FakeRow] = field(default_factory=dict)
    ended: set[AttemptKey] = field(default_factory=set)
    received: list[AnyFrame] = field(default_factory=list)
    steps: int = 0
    server: str = ""
    forsaken: list[AnyFrame] = field(default_factory=list)

    @property
    def free_blocks(self) -> int:
        """Number of blocks without a lease."""
        return self.num_blocks - sum(row.num_blocks for row in self.rows.values())

    def welcome(self) -> Welcome:
        return Welcome(
            peer=Peer(self.role, self.name, self.epoch),
            version=PROTOCOL_VERSION,
            fingerprint=self.fingerprint,
            capacity=_capacity(self.num_blocks),
            labels=self.labels,
            kv_address=f"mem://{self.name}-kv",
        )

    def heartbeat(self) -> WorkerHeartbeat:
        load = Load(free_blocks=self.free_blocks, running=len(self.rows), steps=self.steps)
        return WorkerHeartbeat(
            epoch=self.epoch,
            progress=self.steps,
            has_work=False,
            is_draining=self.is_draining,
            load=load,
            row_credit=self.row_credit,
        )

    def take(self, frame: AnyFrame) -> list[AnyFrame]:
        """Handle a frame of the server; return the answers."""
        self.received.append(frame)
        match frame:
            case Reserve():
                return [self._reserve(frame)]
            case TokenCredit(rows=rows):
                self._credit(rows)
            case Audit(serial=serial):
                return [Audited(serial, decode_account(self))]
            case End():
                self.ended.add(frame.key)
                return [self._ended(frame.key, frame.reason)]
            case ServerHeartbeat(live=live):
                named = {row.key for row in live}
                return [
                    self._ended(key, EndReason.LEASE_EXPIRED)
                    for key in list(self.rows)
                    if key not in named
                ]
        return []

    def take_kv(self, key: AttemptKey) -> bool:
        """Receive an attempt's KV; return False if it has no lease."""
        row = self.rows.get(key)
        if row is not None:
            row.is_ready = True
            for fork in self._forks(key):
                self.rows[fork].is_ready = True
        return row is not None

    def _forks(self, key: AttemptKey) -> list[AttemptKey]:
        """Return the attempts that share an attempt's prompt."""
        return [
            fork
            for fork, row in self.rows.items()
            if row.reserve.fork_of is not None and row.reserve.fork_of.key == key
        ]

    def step(self) -> list[AnyFrame]:
        """Compute one token for every row that may continue."""
        self.steps += 1
        out: list[TokenRow] = []
        ended, self.forsaken = self.forsaken, []
        for key, row in list(self.rows.items()):
            if not row.is_ready or row.position >= row.allowed:
                continue
            sampling = row.reserve.sampling
            is_end = row.position == self.end_at
            token_id = EOS_ID if is_end else token_at(sampling.seed, row.position)
            logprob = None if sampling.logprobs is None else -0.5
            out.append(TokenRow(*key, row.position, token_id, logprob))
            row.position += 1
            if is_end or row.position >= sampling.max_tokens:
                reason = EndReason.STOP if is_end else EndReason.LENGTH
                ended.append(self._ended(key, reason))
        return [Tokens(self.steps, tuple(out)), *ended] if out else ended

    def end(self, key: AttemptKey, reason: EndReason) -> Ended:
        """End an attempt from the worker's side, for example by preemption."""
        return self._ended(key, reason)

    def _reserve(self, frame: Reserve) -> AnyFrame:
        if frame.key in self.ended:
            return Refuse(*frame.key, RefuseReason.ENDED)
        if self.refusal is not None:
            return Refuse(*frame.key, self.refusal, retry_after_s=0.2)
        num_replayed = len(unpack_tokens(frame.replay))
        num_tokens = len(unpack_tokens(frame.prompt)) + num_replayed
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        origin = None if frame.fork_of is None else self.rows.get(frame.fork_of.key)
        if frame.fork_of is not None:
            if origin is None or origin.reserve.prompt != frame.prompt:
                return Refuse(*frame.key, RefuseReason.NO_FORK)
            num_blocks -= (len(unpack_tokens(frame.prompt)) - 1) // BLOCK_SIZE
        if num_blocks > self.free_blocks:
            return Refuse(*frame.key, RefuseReason.NO_BLOCKS, retry_after_s=0.2)
        row = self.rows[frame.key] = FakeRow(frame, num_replayed, frame.allowed, num_blocks)
        row.is_ready = len(unpack_tokens(frame.prompt)) <= frame.local_tokens
        if origin is not None:
            row.is_ready = origin.is_ready
        is_local = row.is_ready or origin is not None
        return Grant(*frame.key, epoch=self.epoch, held_blocks=self.held_blocks, is_local=is_local)

    def _credit(self, rows: tuple[CreditRow, ...]) -> None:
        for credit in rows:
            row = self.rows.get(credit.key)
            if row is not None:
                row.allowed = max(row.allowed, credit.allowed)

    def _ended(self, key: AttemptKey, reason: EndReason) -> Ended:
        row = self.rows.pop(key, None)
        if row is None:
            return Ended(*key, EndReason.UNKNOWN, num_tokens=0, freed_blocks=0)
        for fork in [] if row.is_ready else self._forks(key):
            self.forsaken.append(self._ended(fork, EndReason.FORSAKEN))
        return Ended(*key, reason, num_tokens=row.position, freed_blocks=row.num_blocks)


@dataclass
class FakePrefill:
    """A prefill worker; KV "travels" by a call to the decode worker.

    Attributes:
      labels: its labels.
      waiting: requested attempts that are not computed yet.
      inputs: requested embedding inputs that are not computed yet.
    """

    name: str = "prefill-0"
    epoch: int = 1
    num_blocks: int = 1000
    token_credit: int = 10_000
    prompt_tokens_per_s: float = 0.0
    fingerprint: str = "tiny/f32"
    end_at: int | None = None
    is_draining: bool = False
    role: Role = Role.PREFILL
    labels: dict[str, str] = field(default_factory=dict)
    waiting: dict[AttemptKey, Prefill] = field(default_factory=dict)
    inputs: dict[AttemptKey, Embed] = field(default_factory=dict)
    ended: set[AttemptKey] = field(default_factory=set)
    received: list[AnyFrame] = field(default_factory=list)
    steps: int = 0
    server: str = ""

    def welcome(self) -> Welcome:
        return Welcome(
            peer=Peer(self.role, self.name, self.epoch),
            version=PROTOCOL_VERSION,
            fingerprint=self.fingerprint,
            capacity=_capacity(self.num_blocks),
            labels=self.labels,
        )

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            epoch=self.epoch,
            progress=self.steps,
            has_work=False,
            is_draining=self.is_draining,
            load=Load(
                free_blocks=self.num_blocks,
                waiting=len(self.waiting),
                prompt_tokens_per_s=self.prompt_tokens_per_s,
            ),
            token_credit=self.token_credit,
        )

    def take(self, frame: AnyFrame) -> list[AnyFrame]:
        """Handle a frame of the server; return the answers."""
        self.received.append(frame)
        match frame:
            case Prefill():
                if frame.key not in self.ended:
                    self.waiting[frame.key] = frame
            case Embed():
                if frame.key not in self.ended:
                    self.inputs[frame.key] = frame
            case Audit(serial=serial):
                return [Audited(serial, prefill_account(self))]
            case End():
                self.ended.add(frame.key)
                was_here = self.waiting.pop(frame.key, None) is not None
                was_here |= self.inputs.pop(frame.key, None) is not None
                reason = frame.reason if was_here else EndReason.UNKNOWN
                return [Ended(*frame.key, reason, num_tokens=0, freed_blocks=0)]
        return []

    def step(self, decodes: list[FakeDecode]) -> list[AnyFrame]:
        """Compute the oldest waiting prompt and hand its KV over; without one, compute all
        inputs."""
        if not self.waiting and self.inputs:
            self.steps += 1
            keys, self.inputs = list(self.inputs), {}
            return [frame for key in keys for frame in embedded(key)]
        if not self.waiting:
            return []
        self.steps += 1
        key = next(iter(self.waiting))
        frame = self.waiting.pop(key)
        sampling = frame.sampling
        token_id = EOS_ID if self.end_at == 0 else token_at(sampling.seed, 0)
        logprob = None if sampling.logprobs is None else -0.5
        first = FirstToken(
            *key, TokenRow(*key, 0, token_id, logprob), cached_tokens=2, queue_s=0.0, compute_s=0.01
        )
        target = next(
            (d for d in decodes if Peer(d.role, d.name, d.epoch) == frame.target.peer), None
        )
        is_taken = target is not None and target.take_kv(key)
        reason = EndReason.HANDED_OVER if is_taken else EndReason.PEER_LOST
        return [first, Ended(*key, reason, num_tokens=1, freed_blocks=1)]


def vector_of(request_id: bytes) -> bytes:
    """Return the fake model's vector for an input."""
    return request_id[-4:]


def embedded(key: AttemptKey) -> list[AnyFrame]:
    """Return a prefill worker's frames for a computed input."""
    vector = Embedded(*key, vector=vector_of(key.request_id), queue_s=0.0, compute_s=0.01)
    return [vector, Ended(*key, EndReason.EMBEDDED, num_tokens=0, freed_blocks=1)]


def replay_of(frame: Reserve) -> list[int]:
    """Return the replayed tokens of a RESERVE."""
    return list(unpack_tokens(frame.replay))


def packed(text: str) -> bytes:
    """Return a text's tokens by the tiny tokenizer, in wire format."""
    return pack_tokens(text.encode())


def _capacity(num_blocks: int) -> Capacity:
    return Capacity(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        bytes_per_block=64,
        max_num_seqs=8,
        max_model_len=4096,
    )
