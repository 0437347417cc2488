"""Settings of models, where one fleet serves several: what an operator asks for, what a server is
told."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (get_type_hints reads the annotations)
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from .adapters import AdapterConfig, require_adapter_names
from .limits import Positive, require
from .parsers import ReasoningParser, ToolParser
from .supervisor import MAX_WORKERS

MAX_MODELS: Final = MAX_WORKERS
"""Of one fleet: each has a decode worker at least."""
MAX_ALIASES: Final = 16
"""Of one model: names of older models that clients still send. The file of members has all of them
with each model, in at most 16 KiB on average."""
MAX_ALIAS_CHARS: Final = 128
"""Names of models in clients are shorter. At 6 bytes a character, the most in JSON, aliases take at
most 12 KiB."""


@dataclass(frozen=True, slots=True)
class FleetModelConfig:
    """One model of a fleet, as `[models.NAME]` of a settings file or NAME=REF on the command line
    asks for it."""

    ref: str = ""
    """What `fleet.model` takes: a directory, a GGUF file, or a version of the store."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for it: at most 16, each of at most 128 characters."""
    prefill: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] | None = None
    """Prefill workers; None for as many as `fleet.prefill`."""
    decode: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] | None = None
    """Decode workers; None for as many as `fleet.decode`."""
    tool_parser: ToolParser = ToolParser.AUTO
    """As `server.tool_parser`, for this model; `auto` is what that says."""
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    """As `server.reasoning_parser`, for this model; `auto` is what that says."""
    start: bool = True
    """Whether its workers start with the fleet; otherwise with the first request for it."""
    pinned: bool = False
    """Whether its workers stay, whatever other models need."""
    keep_alive_s: Positive | None = None
    """Its workers end after so long without a request; None keeps them until memory is needed."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name, each a directory as PEFT saves it or a version of the store; requests
    name `MODEL:ADAPTER`."""

    def __post_init__(self) -> None:
        require_adapter_names(self.adapters)
        count = len(self.aliases)
        require(count <= MAX_ALIASES, "aliases", count, f"at most {MAX_ALIASES} names")
        longest = max(map(len, self.aliases), default=0)
        allowed = f"names of at most {MAX_ALIAS_CHARS} characters"
        require(longest <= MAX_ALIAS_CHARS, "aliases", f"{longest} characters", allowed)


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """One model of a server that serves several; `triolet serve` fills it in."""

    name: str
    """What clients call it."""
    model_dir: str
    """Absolute path of its directory."""
    digest: str = ""
    """sha256:… of its version in the store; empty for a directory that is not in one."""
    aliases: tuple[str, ...] = ()
    prefill_addresses: tuple[str, ...] = ()
    decode_addresses: tuple[str, ...] = ()
    spare_addresses: tuple[str, ...] = ()
    tool_parser: ToolParser = ToolParser.AUTO
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    adapters: tuple[AdapterConfig, ...] = ()
    unnamed_adapters: tuple[AdapterConfig, ...] = ()
    """As `server.unnamed_adapters`."""
    compute_digest: str = ""
    """As `server.compute_digest`."""
