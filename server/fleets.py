"""Served models with their workers: reads a model's directory, and creates a queue and worker links
for each model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from .api.json_body import checked_fields
from .api.served_models import ServedModel
from .contract.request_events import RequestEnded, RequestEvents
from .metrics.access_log import write_access_line
from .peers.peers import ALONE
from .scheduling.links import Links
from .text.grammars import Grammars
from .text.model_files import (
    EmbeddingModel,
    ModelCard,
    PageWords,
    SamplingDefaults,
    read_embedding_model,
    read_model_card,
    read_page_words,
    read_sampling_defaults,
)
from .text.tokenizer import TextModel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence, Set

    from transport.link import Network
    from triolet.config import ServerConfig

    from .metrics.metrics import Metrics
    from .tenants.quotas import Quotas
    from .tenants.usage_ledger import UsageLedger
    from .text.process import Do, Work

log = structlog.get_logger(__name__)

NO_TEMPLATE: Final = "use /v1/completions, or serve a model that has a chat template"


class ModelFiles(NamedTuple):
    """What a server reads from a model's directory."""

    text: TextModel
    defaults: SamplingDefaults
    embedding: EmbeddingModel
    card: ModelCard
    page_words: PageWords


def read_files(config: ServerConfig, do: Do) -> ModelFiles:
    """Read what a server needs from a model's directory. Takes seconds for a large tokenizer.

    Args:
      config: the server's settings for this model only.
      do: runs slow text jobs.

    Raises:
      ModelError: a file is missing or broken.
    """
    model_dir = config.model_dir
    text = TextModel.load(
        model_dir,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        generic_tools=config.generic_tools,
        bounds=config.template,
        do=do,
    )
    if not text.has_chat_template:
        log.warning("no_chat_template", model=config.model_name, advice=NO_TEMPLATE)
    return ModelFiles(
        text,
        read_sampling_defaults(model_dir),
        read_embedding_model(model_dir),
        read_model_card(model_dir),
        read_page_words(model_dir, has_chat_template=text.has_chat_template),
    )


def first_work(models: Sequence[ServedModel]) -> list[Work]:
    """Return the jobs that each text process runs first: import the body parsers, and load the
    tokenizer if the server started with one model. Of many models, most may never be used."""
    work: list[Work] = [(checked_fields, ("ChatRequest", b"{}", True))]
    if len(models) == 1:
        work += *models[0].text.first_work, models[0].grammars.first_work
    return work


def names_of(config: ServerConfig) -> dict[str, tuple[str, ...]]:
    """Return each model's names, its primary name first, keyed by the primary name."""
    return {one.model_name: (one.model_name, *one.model_aliases) for one in config.of_models}


class Fleets:
    """The workers of all models. Each model has its own queue and links.

    Args:
      config: the server's settings.
      network: creates the sockets of all links.
      metrics: observe every model.
      quotas: the tenants' quotas, shared by all models.
      names: each model's name and aliases, by name; kept up to date.
      do: runs slow grammar jobs.
      ledger: records usage; None if disabled.

    Attributes:
      own_name: this server's name among the servers on its port.
      by_model: the workers of each model, by its name.
    """

    def __init__(
        self,
        config: ServerConfig,
        network: Network,
        metrics: Metrics,
        quotas: Quotas,
        names: dict[str, tuple[str, ...]],
        do: Do,
        ledger: UsageLedger | None = None,
    ) -> None:
        self.own_name = ALONE if config.peers is None else config.peers.name
        self.by_model: dict[str, Links] = {}
        self._network = network
        self._metrics = metrics
        self._quotas = quotas
        self._names = names
        self._do = do
        self._ledger = ledger

    def __iter__(self) -> Iterator[Links]:
        return iter(self.by_model.values())

    @property
    def alive(self) -> frozenset[str]:
        """Addresses of the workers that answer heartbeats."""
        return frozenset(
            worker.address
            for fleet in self
            for worker in fleet.status().workers
            if worker.state in ("alive", "suspect", "draining")
        )

    def add_all(self, config: ServerConfig, files: Mapping[str, ModelFiles]) -> list[ServedModel]:
        """Return the models that a server starts with.

        Args:
          config: the server's settings.
          files: what was read for each model, by its name.
        """
        is_only = len(files) == 1
        return [self.add(one, files[one.model_name], is_only=is_only) for one in config.of_models]

    def add(self, config: ServerConfig, files: ModelFiles, *, is_only: bool) -> ServedModel:
        """Return a model with a new queue and links. Call `run` to start the links.

        Args:
          config: the server's settings for this model only.
          files: what was read from its directory.
          is_only: whether the server was started with this model only.
        """
        name = config.model_name
        if name not in self._metrics.fleets:
            self._metrics.add(name, config.model_digest, lambda: self.by_model[name].status())
        events = RequestEvents(self._quotas.price)
        self._metrics.fleets[name].subscribe_to(events)
        self._metrics.slos.subscribe_to(events)
        self._quotas.subscribe_to(events)
        events.subscribe(RequestEnded, write_access_line)
        self._metrics.rollouts.watch(name, events, self._metrics.fleets[name])
        if self._ledger is not None:
            self._ledger.subscribe_to(events)
        fleet = Links(
            config,
            files.text,
            self._network,
            self._metrics.fleets[name],
            self.own_name if is_only else f"{self.own_name}.{name}",
            events=events,
            takes_unversioned=is_only,
        )
        self._names[name] = (name, *config.model_aliases)
        self.by_model[name] = fleet
        return self._served(config, files, fleet)

    def set_version(self, config: ServerConfig, files: ModelFiles) -> ServedModel:
        """Return a new version of a model that the same workers serve. Running requests continue.

        Args:
          config: the server's settings for this version only.
          files: what was read from its directory.
        """
        fleet = self.by_model[config.model_name]
        fleet.set_version(config)
        self._metrics.set_version(config.model_name, config.model_digest)
        return self._served(config, files, fleet)

    def _served(self, config: ServerConfig, files: ModelFiles, fleet: Links) -> ServedModel:
        grammars = Grammars(
            Path(config.model_dir) / "tokenizer.json",
            files.text.eos_token_ids,
            config.grammar,
            self._do,
            partial(self._metrics.grammar_checked, config.model_name),
        )
        return ServedModel(
            config,
            fleet,
            files.text,
            grammars,
            files.defaults,
            embedding=files.embedding,
            card=files.card,
            page_words=files.page_words,
        )

    def know(self, routes: Collection[str]) -> None:
        """Register these public route names and no others, so that they have prices and places in
        ladders like models."""
        for name in self._names.keys() - self.by_model.keys() - set(routes):
            del self._names[name]
        for name in routes:
            self._names.setdefault(name, (name,))

    def remove(self, name: str) -> None:
        """Remove a model after all its requests have ended and its links are closed."""
        del self.by_model[name], self._names[name]
        self._metrics.remove(name)

    async def run(
        self, name: str, task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run a model's links until the cancel scope passed to `task_status` is cancelled."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.by_model[name].run)
                task_status.started(scope)

    async def drain(self) -> None:
        """Refuse new requests for every model, and wait until all running requests have ended."""
        async with trio.open_nursery() as nursery:
            for fleet in self:
                nursery.start_soon(fleet.drain)

    def cancel_tenants(self, tenants: Set[str]) -> None:
        """Cancel all requests of tenants that were disabled or removed."""
        for fleet in self:
            fleet.cancel_tenants(tenants)

    def hold_s(self) -> float:
        """Return the longest time [s] that any model holds a batch line back for interactive
        requests.

        Models on one machine share its cores. With several models, only those with workers count,
        because requests that wait for a worker use no cores yet.
        """
        is_only = len(self.by_model) == 1
        holding = [fleet for fleet in self if fleet.hold_s() > 0]
        return max(
            (fleet.hold_s() for fleet in holding if is_only or fleet.status().is_ready), default=0.0
        )
