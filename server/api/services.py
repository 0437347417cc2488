"""The parts of the server that every route is handed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from ..cache.store import ResponseStore
from ..metrics.recent import RecentFigures
from ..tenants.opening import quotas_in_memory
from ..tenants.tenancy import Tenancy
from ..text.process import Do, at_once
from .door import BodyRoom, RefusalLog, RefusalPace
from .request_scope import ServerState
from .resume import KeptAnswers
from .served_models import ModelTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triolet.config import ServerConfig

    from ..metrics.metrics import Metrics
    from ..tenants.quotas import Quotas
    from .peers import Peers
    from .served_models import ServedModel


@dataclass(frozen=True, slots=True)
class Services:
    """What routes work with."""

    config: ServerConfig
    models: ModelTable
    metrics: Metrics
    state: ServerState = field(default_factory=ServerState)
    count_connections: Callable[[], int] = lambda: 0
    """How many clients are connected."""
    peers: Peers | None = None
    """None where this is the only server."""
    tenancy: Tenancy = field(default_factory=Tenancy)
    """Tenants and their keys; without tenants every client is served."""
    quotas: Quotas = field(default_factory=quotas_in_memory)
    """What they may use."""
    do: Do = at_once
    """Does work that takes long, in processes where the server has streams."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix time at which the models became available here, which the API calls their creation."""
    wall: Callable[[], float] = time.time
    """Returns the Unix time; temporary routes expire by it."""
    kept: KeptAnswers = field(init=False)
    """Answers that clients may come back to."""
    bodies: BodyRoom = field(init=False)
    """Bytes of bodies under way."""
    refusals: RefusalPace = field(init=False)
    """How fast refusals are answered."""
    recent: RecentFigures = field(init=False)
    """What was counted in the last seconds."""
    refusal_log: RefusalLog = field(init=False)
    """Which of them are logged."""
    store: ResponseStore | None = field(init=False, default=None)
    """Answers that are given again, of all models; None where none are."""
    responses: ResponseStore = field(init=False)
    """Stored responses; empty where none are kept."""
    lives: Iterator[int] = field(init=False, default_factory=count)
    """Tells models of one name apart, which came one after the other."""

    def __post_init__(self) -> None:
        door = self.config.door
        object.__setattr__(self, "bodies", BodyRoom(door))
        object.__setattr__(self, "refusals", RefusalPace(door))
        object.__setattr__(self, "refusal_log", RefusalLog(door))
        object.__setattr__(self, "recent", RecentFigures(self.metrics, self.config))
        object.__setattr__(self, "responses", ResponseStore(self.config.responses))
        self.metrics.http.kept["response_store"] = self.responses
        sweeps = [self.responses.expire]
        if self.config.response_cache.max_bytes:
            # One for all models: its bounds are those of the server.
            store = ResponseStore(self.config.response_cache)
            object.__setattr__(self, "store", store)  # as a frozen dataclass's own __init__ does
            models = ModelTable([self.with_store(one) for one in self.models], self.models.routes)
            object.__setattr__(self, "models", models)
            self.metrics.http.kept["response_cache"] = store
            sweeps.append(store.expire)
        kept = KeptAnswers(
            self.config.resume,
            is_leaving=lambda: self.state.is_draining,
            count=self.metrics.http.resumption,
            sweeps=sweeps,
        )
        object.__setattr__(self, "kept", kept)

    def with_store(self, model: ServedModel) -> ServedModel:
        """Return a model whose answers are given again, where they are kept."""
        if self.store is None:
            return model
        return model.keeping(self.store, f"{model.name} {next(self.lives)}")
