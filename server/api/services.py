"""`Services`: the server's parts that every route handler receives."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from ..cache.store import ResponseStore
from ..metrics.history import FleetHistory
from ..tenants.opening import quotas_in_memory
from ..tenants.tenancy import Tenancy
from ..text.process import Do, at_once
from .door import BodyRoom, RefusalLog, RefusalPace
from .gateway_hints import Objectives
from .request_scope import ServerState
from .resume import KeptAnswers
from .served_models import ModelTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triolet.config import ServerConfig

    from ..metrics.metrics import Metrics
    from ..peers.host_secret import HostSecret
    from ..peers.other_hosts import OtherHosts
    from ..peers.peers import Peers
    from ..tenants.quotas import Quotas
    from .served_models import ServedModel


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the server that route handlers use."""

    config: ServerConfig
    models: ModelTable
    metrics: Metrics
    state: ServerState = field(default_factory=ServerState)
    count_connections: Callable[[], int] = lambda: 0
    """Returns the number of connected clients."""
    peers: Peers | None = None
    """None if this is the only server on its port."""
    hosts: OtherHosts | None = None
    """None if keys are not shared with other hosts."""
    tenancy: Tenancy = field(default_factory=Tenancy)
    """Tenants and their keys; without tenants every client is served."""
    quotas: Quotas = field(default_factory=quotas_in_memory)
    """The tenants' quotas."""
    do: Do = at_once
    """Runs slow jobs, in separate processes if the server has streams."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix time at which the models became available here; the API reports it as their creation."""
    wall: Callable[[], float] = time.time
    """Returns the Unix time, by which temporary routes expire."""
    kept: KeptAnswers = field(init=False)
    """Resumable answers."""
    bodies: BodyRoom = field(init=False)
    """Limits the total size of request bodies."""
    refusals: RefusalPace = field(init=False)
    """Delays refusals."""
    history: FleetHistory = field(init=False)
    """Figures of the last seconds and of the last hour."""
    refusal_log: RefusalLog = field(init=False)
    """Logs refusals up to a rate."""
    store: ResponseStore | None = field(init=False, default=None)
    """The response cache of all models; None if it is off."""
    objectives: Objectives = field(init=False)
    """Reads an inference gateway's request headers."""
    responses: ResponseStore = field(init=False)
    """Stored responses; always empty if they are off."""
    lives: Iterator[int] = field(init=False, default_factory=count)
    """Numbers that distinguish successive models with the same name."""

    def __post_init__(self) -> None:
        door = self.config.door
        object.__setattr__(self, "bodies", BodyRoom(door))
        object.__setattr__(self, "refusals", RefusalPace(door))
        object.__setattr__(self, "refusal_log", RefusalLog(door))
        object.__setattr__(self, "objectives", Objectives(self.config.gateway_objectives))
        history = FleetHistory(
            self.metrics,
            self.config,
            lambda: {one.version: one.fleet.status() for one in self.models},
            self.wall,
        )
        object.__setattr__(self, "history", history)
        object.__setattr__(self, "responses", ResponseStore(self.config.responses))
        self.metrics.http.kept["response_store"] = self.responses
        sweeps = [self.responses.expire]
        if self.config.response_cache.max_bytes:
            # One store for all models: its limits apply to the server.
            store = ResponseStore(self.config.response_cache)
            object.__setattr__(self, "store", store)  # like the __init__ of a frozen dataclass
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

    @property
    def host_secret(self) -> HostSecret | None:
        """The secret of the servers on several hosts; None without other hosts."""
        return None if self.hosts is None else self.hosts.secret

    def route_valid_s(self) -> dict[str, float]:
        """Return for how long the route of each rollout is valid, by public name; 0 if this server
        has none, so that its new requests go to the stable version."""
        now_s, routes = self.wall(), self.models.routes
        views, zone = self.metrics.rollouts.views, self.config.zone
        shown = [one.model for one in views if one.has_route(zone)]
        ends = {name: routes[name].valid_until if name in routes else None for name in shown}
        return {name: max(0.0, (end or 0.0) - now_s) for name, end in ends.items()}

    def with_store(self, model: ServedModel) -> ServedModel:
        """Return a model with a response cache, if enabled."""
        if self.store is None:
            return model
        return model.keeping(self.store, f"{model.name} {next(self.lives)}")
