"""What the surface needs of its neighbours, and the parts that every route is handed.

Knows shapes only: the fleet and the text model are handed in by the process entry, fakes by tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..cache.front import CachingFleet
from ..tenants.opening import quotas_in_memory
from ..tenants.tenancy import Tenancy
from ..text.model_card import ModelCard
from ..text.model_files import EmbeddingModel, PageWords, SamplingDefaults
from ..text.threads import FairLimiter
from .door import BodyRoom, RefusalLog, RefusalPace
from .live import Lifecycle
from .operations.fleet_status import RecentFigures
from .resume import KeptAnswers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triolet.config import ServerConfig
    from triolet.sampling import Grammar

    from ..contract.fleet import FleetPort
    from ..jobs.storage import Storage
    from ..tenants.quotas import Quotas
    from ..text.reasoning import Reasoner
    from ..text.tokenizer import ChatPrompt
    from ..text.tool_calls import ToolForm
    from .peers import SiblingAnswer


class TextPort(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def tool_form(self) -> ToolForm:
        """How the model writes calls of tools."""
        ...

    @property
    def reasoner(self) -> Reasoner | None:
        """How the model reasons; None if it does not."""
        ...

    @property
    def tool_tokens(self) -> Mapping[str, int]:
        """Markers of that form that are single tokens."""
        ...

    @property
    def tool_markers(self) -> Mapping[int, str]:
        """Special tokens among them, and how the text of an answer shows each."""
        ...

    async def shows_tools(self) -> bool:
        """Whether the model's chat template shows it the tools of a request."""
        ...

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> Sequence[int]:
        """Return the ids of a text; an error of the text names `param`. With `max_tokens` it is cut
        to have no more, with the special tokens around it."""
        ...

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> ChatPrompt:
        """Return the prompt that a conversation becomes by the model's own template; to be encoded
        as it is, without adding special tokens."""
        ...

    async def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, param: str = "prompt"
    ) -> str:
        """Return the text of some ids; an error names `param`."""
        ...

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each id by itself, special tokens included."""
        ...


class GrammarPort(Protocol):
    """Says whether a grammar can be used."""

    async def check(self, grammar: Grammar, param: str) -> None:
        """Return if it can; RequestError that names `param` if not."""
        ...


class HttpMetricsPort(Protocol):
    """What the surface counts."""

    def request(self, endpoint: str) -> None:
        """Count a request by the name of its route."""
        ...

    def error(self, status: int, *, is_of_queue: bool = False) -> None:
        """Count a request that was answered with an error, perhaps one of the queue's."""
        ...

    def errors(self) -> Mapping[str, float]:
        """Return how many requests were answered with an error, by status."""
        ...

    def errors_of_queue(self, status: str) -> int:
        """Return how many of those with a status the queue has counted too."""
        ...

    def ignored(self, name: str) -> None:
        """Count a parameter that had no effect, by a name from a bounded set."""
        ...

    def resumption(self, what: str) -> None:
        """Count what becomes of answers that clients may come back to."""
        ...

    def watch_response_cache(self, cache: CachingFleet) -> None:
        """Show what comes of the response cache."""
        ...


class MetricsPort(Protocol):
    """What is counted."""

    @property
    def http(self) -> HttpMetricsPort:
        """Requests of clients."""
        ...

    async def scrape(self) -> bytes:
        """Return everything in Prometheus's text form; others have their turn meanwhile."""
        ...

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """Return counters by their labels, and histograms' running totals by upper bounds."""
        ...


class SiblingsPort(Protocol):
    """The other servers on this port."""

    @property
    def own_name(self) -> str:
        """What this server is called among them."""
        ...

    def owner_of(self, key: str) -> str | None:
        """Return which of the others keeps what a key names; None if this one does."""
        ...

    async def reach(self, name: str, patience_s: float) -> SiblingAnswer:
        """Open a connection to one of the others; an OSError says that it cannot be had."""
        ...

    async def ask(self, target: str) -> dict[str, bytes | None]:
        """GET something of each; None of who does not answer. Bounded in time."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What routes work with."""

    config: ServerConfig
    fleet: FleetPort
    text: TextPort
    metrics: MetricsPort
    grammars: GrammarPort
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    count_connections: Callable[[], int] = lambda: 0
    """How many clients are connected."""
    embedding: EmbeddingModel = field(default_factory=EmbeddingModel)
    """How inputs become vectors with this model."""
    card: ModelCard = field(default_factory=ModelCard)
    """What clients that show models are told of this one."""
    page_words: PageWords = field(default_factory=PageWords)
    """What the chat page says of this model."""
    storage: Storage | None = None
    """Files and batches; None where none are kept."""
    siblings: SiblingsPort | None = None
    """None where this is the only server."""
    tenancy: Tenancy = field(default_factory=Tenancy)
    """Who may ask; without tenants anybody who reaches the port."""
    quotas: Quotas = field(default_factory=quotas_in_memory)
    """What they may use."""
    kept: KeptAnswers = field(init=False)
    """Answers that clients may come back to."""
    parser_threads: FairLimiter = field(init=False)
    """For large bodies. One: parsing is Python's work, so a second would not make it faster."""
    bodies: BodyRoom = field(init=False)
    """Bytes of bodies under way."""
    refusals: RefusalPace = field(init=False)
    """How fast refusals are answered."""
    recent: RecentFigures = field(init=False)
    """What was counted in the last seconds."""
    refusal_log: RefusalLog = field(init=False)
    """Which of them are logged."""

    def __post_init__(self) -> None:
        door = self.config.door
        limiter = FairLimiter(1, self.config.turns, "large bodies wait to be parsed")
        object.__setattr__(self, "parser_threads", limiter)
        object.__setattr__(self, "bodies", BodyRoom(door))
        object.__setattr__(self, "refusals", RefusalPace(door))
        object.__setattr__(self, "refusal_log", RefusalLog(door))
        object.__setattr__(self, "recent", RecentFigures(self.metrics, self.config))
        sweeps: list[Callable[[float], None]] = []
        if self.config.response_cache.max_bytes:
            fleet = CachingFleet(self.fleet, self.config.response_cache, self.quotas)
            object.__setattr__(self, "fleet", fleet)  # as a frozen dataclass's own __init__ does
            self.metrics.http.watch_response_cache(fleet)
            sweeps.append(fleet.store.expire)
        kept = KeptAnswers(
            self.config.resume,
            is_leaving=lambda: self.lifecycle.is_draining,
            count=self.metrics.http.resumption,
            sweeps=sweeps,
        )
        object.__setattr__(self, "kept", kept)
