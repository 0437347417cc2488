"""The models that the server serves, and the table that finds the model a request names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from transport.control_protocol import ModelState
from triolet.adapter_keys import digest_bytes
from triolet.config import ANY_MODEL, AUTO, SEPARATOR
from triolet.errors import ConfigError, RequestError

from ..cache.front import NOT_SERVING, CachingFleet
from ..text.model_files import EmbeddingModel, ModelCard, PageWords, SamplingDefaults
from .errors import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from triolet.config import AdapterConfig, ServerConfig
    from triolet.config.routes import Route

    from ..cache.store import ResponseStore
    from ..scheduling.links import Links
    from ..scheduling.status import FleetStatus
    from ..text.grammars import Grammars
    from ..text.tokenizer import TextModel

MAX_LISTED: Final = 16
"""Maximum number of names in an error about an unknown model."""
MAX_COMPARED: Final = 64
"""Characters of an unknown name that are compared with existing names: a name of megabytes would
take a second of the event loop."""
FINGERPRINT_DIGITS: Final = 12
"""Digits of a digest in `system_fingerprint`: enough to distinguish versions, short to read."""
DIGEST: Final = "sha256:"
AUTO_IS_OFF: Final = (
    f"choosing a model with {AUTO} is off; the operator can turn it on with [auto] ladder in "
    "triolet.toml"
)


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model with everything that requests to it need.

    Attributes:
      config: the server's settings for this model only.
      fleet: its workers, with their own queue.
      text: its tokenizer and template.
      grammars: checks grammars against its tokens.
      defaults: default sampling parameters.
      embedding: its embedding settings.
      card: metadata for clients that list models.
      page_words: texts for the chat page.
      adapter: its LoRA adapter; None for the base model.
      public_name: the route that it is a version of; empty if it is served under its own name.
    """

    config: ServerConfig
    fleet: Links | CachingFleet
    text: TextModel
    grammars: Grammars
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    embedding: EmbeddingModel = field(default_factory=EmbeddingModel)
    card: ModelCard = field(default_factory=ModelCard)
    page_words: PageWords = field(default_factory=PageWords)
    adapter: AdapterConfig | None = None
    public_name: str = ""

    @property
    def name(self) -> str:
        """Its name in responses."""
        return self.names[0]

    @property
    def base_name(self) -> str:
        """The model's name without the adapter; prices and limits use it."""
        return self.public_name or self.config.model_name

    @property
    def version(self) -> str:
        """The name used by its queue and workers, unique on this server."""
        return self.config.model_name

    @property
    def names(self) -> tuple[str, ...]:
        """All listed names, the primary one first."""
        aliases = (one for one in self.config.model_aliases if one != ANY_MODEL)
        behind = "" if self.adapter is None else f"{SEPARATOR}{self.adapter.name}"
        return tuple(f"{name}{behind}" for name in (self.base_name, *aliases))

    @property
    def digest(self) -> str:
        """sha256:… of its version or adapter; empty for a directory that is not in a store."""
        return self.config.model_digest if self.adapter is None else self.adapter.digest

    @property
    def adapter_key(self) -> bytes:
        """Its adapter's key in frames; empty for the base model."""
        return b"" if self.adapter is None else digest_bytes(self.adapter.digest)

    @property
    def with_adapters(self) -> list[ServedModel]:
        """Return this model and this model with each of its adapters."""
        return [replace(self, adapter=one) for one in self.config.model_adapters]

    @property
    def system_fingerprint(self) -> str | None:
        """The digest in the short form of OpenAI's responses; None without one."""
        digits = self.digest.removeprefix(DIGEST)
        return f"fp_{digits[:FINGERPRINT_DIGITS]}" if digits else None

    @property
    def state(self) -> ModelState:
        """Its state, according to its workers."""
        return state_of(self.fleet.status())

    def keeping(self, store: ResponseStore, name: str) -> ServedModel:
        """Return this model with a response cache.

        Args:
          store: the answers of all models.
          name: the model's name in cache keys, which no other model of this process ever has.
        """
        assert not isinstance(self.fleet, CachingFleet)
        fleet = CachingFleet(self.fleet, store, self.config.response_cache, name)
        return replace(self, fleet=fleet)


def state_of(status: FleetStatus) -> ModelState:
    """Return a model's state from its workers, or from control if it has none."""
    if status.is_draining:
        return ModelState.DRAINING
    if status.is_ready:
        return ModelState.SERVING
    if status.told is not None and status.told is not ModelState.SERVING:
        return status.told
    is_any = any(worker.state not in NOT_SERVING for worker in status.workers)
    return ModelState.LOADING if is_any else ModelState.STAGED


class ModelTable:
    """All models of a server by name, each alone and with each of its adapters.

    Args:
      models: the first one answers requests that name no model.
      routes: routes by public name; each of their versions is one of the models.

    Attributes:
      first: the first model.
      listed: every model, each followed by itself with its adapters. A route's stable version
        represents all of its versions.
      routes: see Args.

    Raises:
      ConfigError: two models have one name.
    """

    def __init__(
        self, models: Sequence[ServedModel], routes: Mapping[str, Route] | None = None
    ) -> None:
        self._use(models, routes or {})

    def _use(self, models: Sequence[ServedModel], routes: Mapping[str, Route]) -> None:
        public = {version: name for name, route in routes.items() for version in route.shares}
        models = [
            one if one.public_name == name else replace(one, public_name=name)
            for one in models
            for name in (public.get(one.version, ""),)
        ]
        stable = {route.stable for route in routes.values()}
        each = sorted(models, key=lambda one: bool(one.public_name) and one.version not in stable)
        listed = [one for model in each for one in (model, *model.with_adapters)]
        by_name: dict[str, ServedModel] = {}
        for model in listed:
            for name in model.names:
                other = by_name.setdefault(name, model)
                is_same_route = other.public_name and other.public_name == model.public_name
                if other is not model and not is_same_route:
                    raise ConfigError(
                        f"two models are called {name!r}: {other.config.model_dir} and "
                        f"{model.config.model_dir}; rename one of them"
                    )
        self.first, self.routes = models[0], routes
        self.listed = [one for one in listed if by_name[one.name] is one]
        self._models, self._by_name = tuple(models), by_name
        self._any = next((one for one in models if ANY_MODEL in one.config.model_aliases), None)

    def change(
        self,
        routes: Mapping[str, Route],
        *added: ServedModel,
        without: Collection[str] = (),
        order: Sequence[str] = (),
    ) -> None:
        """Replace the routes, and add and remove models.

        Args:
          routes: routes by public name; all of their versions must exist after the change.
          added: models to add, after those not in `order`.
          without: names of models to remove; at least one model must be left.
          order: names of models; the first one that exists answers requests that name no model.

        Raises:
          ConfigError: two models have one name and are not versions of one route; nothing has
            changed.
        """
        kept = (one for one in self._models if one.version not in without)
        places = {version: place for place, version in enumerate(order)}
        ordered = sorted((*kept, *added), key=lambda one: places.get(one.version, len(places)))
        self._use(ordered, routes)

    def public_name_of(self, version: str) -> str:
        """Return the public name of a version, or its own name if it is no longer served."""
        names = (one.base_name for one in self._models if one.version == version)
        return next(names, version)

    def version_for(self, model: ServedModel, choose: Callable[[Route], str]) -> ServedModel:
        """Return the version that a request gets; the model itself if it is not part of a route.

        Args:
          model: the model found by name.
          choose: returns the name of a route's version.
        """
        route = self.routes.get(model.public_name)
        if route is None:
            return model
        version = choose(route)
        own = next(one for one in self._models if one.version == version)
        if model.adapter is None:
            return own
        same = (one for one in own.with_adapters if one.name == model.name)
        return next(same, model)

    def set_adapters(self, name: str, adapters: tuple[AdapterConfig, ...]) -> None:
        """Replace a model's adapters.

        Raises:
          ConfigError: a model or alias has an adapter's name; nothing has changed.
        """
        [own] = [one for one in self._models if one.version == name]
        self.put(replace(own, config=replace(own.config, model_adapters=adapters)))

    def put(self, model: ServedModel) -> None:
        """Replace the model with the same version name.

        Raises:
          ConfigError: another model has one of its names; nothing has changed.
        """
        models = [model if one.version == model.version else one for one in self._models]
        self._use(models, self.routes)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def names(self) -> list[str]:
        """All listed names."""
        return list(self._by_name)

    @property
    def takes_any_name(self) -> bool:
        """Whether a model accepts every name."""
        return self._any is not None

    def find(self, name: str) -> ServedModel | None:
        """Return the model with this name, or the one that accepts every name.

        The latter does not apply to `NAME:ADAPTER` if NAME is a model, whether or not this process
        has known the adapter: the base model must not answer for an unloaded adapter.
        """
        found = self._by_name.get(name)
        if found is None and not self._names_an_adapter(name):
            found = self._any
        return found

    def _names_an_adapter(self, name: str) -> bool:
        before, _, behind = name.rpartition(SEPARATOR)
        return bool(behind) and before in self._by_name

    def is_listed(self, name: str) -> bool:
        """Whether a model has exactly this name."""
        return name in self._by_name

    def named(self, name: str | None) -> ServedModel:
        """Return the model that a request names; the first one if it names none.

        Raises:
          RequestError: 404, the model does not exist.
        """
        found = self.first if name is None else self.find(name)
        if found is None:
            hint = f"; {AUTO_IS_OFF}" if name == AUTO else ""
            raise RequestError(
                f"there is no model {echo(name)}; {self._listed(name or '')}{hint}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return found

    def _listed(self, wanted: str) -> str:
        """Return the list of names, and the one that was probably meant."""
        names = self.names
        shown = ", ".join(names[:MAX_LISTED])
        rest = len(names) - MAX_LISTED
        listed = f"there is {shown}" if len(names) == 1 else f"there are {shown}"
        if rest > 0:
            listed += f" and {rest} more, which GET /v1/models lists"
        near = get_close_matches(wanted[:MAX_COMPARED], names, n=1)
        return f"{listed}; did you mean {near[0]}?" if near and len(names) > 1 else listed
