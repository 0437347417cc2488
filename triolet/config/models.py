"""Settings of models in a fleet that serves several: as the operator writes them, and as servers
get them."""

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
"""Models of one fleet: each has at least one decode worker."""
MAX_ALIASES: Final = 16
"""Aliases of one model: names of older models that clients still send. The members file lists them
with each model, in at most 16 KiB on average."""
MAX_ALIAS_CHARS: Final = 128
"""Real names are shorter. At 6 bytes per character, the most in JSON, aliases take at most 12
KiB."""


@dataclass(frozen=True, slots=True)
class FleetModelConfig:
    """One model of a fleet: `[models.NAME]` in a settings file, or NAME=REF on the command line."""

    ref: str = ""
    """The same forms as `fleet.model`: a directory, a GGUF file, or a version of the store."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for it: at most 16, each of at most 128 characters."""
    prefill: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] | None = None
    """Prefill workers; None means `fleet.prefill`."""
    decode: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] | None = None
    """Decode workers; None means `fleet.decode`."""
    tool_parser: ToolParser = ToolParser.AUTO
    """`server.tool_parser` for this model; `auto` takes that setting."""
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    """`server.reasoning_parser` for this model; `auto` takes that setting."""
    start: bool = True
    """Whether its workers start with the fleet; otherwise with the first request for it."""
    pinned: bool = False
    """Whether its workers stay, even if other models need memory."""
    keep_alive_s: Positive | None = None
    """Its workers end after this long without a request; None keeps them until memory is needed."""
    deadline_s: Positive | None = None
    """Longest deadline of its requests, where it is below `server.default_deadline_s`."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name, each a PEFT directory or a version of the store; requests name
    `MODEL:ADAPTER`."""

    def __post_init__(self) -> None:
        require_adapter_names(self.adapters)
        count = len(self.aliases)
        require(count <= MAX_ALIASES, "aliases", count, f"at most {MAX_ALIASES} names")
        longest = max(map(len, self.aliases), default=0)
        allowed = f"names of at most {MAX_ALIAS_CHARS} characters"
        require(longest <= MAX_ALIAS_CHARS, "aliases", f"{longest} characters", allowed)


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """One model of a server that serves several. `triolet serve` fills it in."""

    name: str
    """Name for clients."""
    model_dir: str
    """Absolute path of its directory."""
    digest: str = ""
    """sha256:… of its version in the store; empty for a directory outside the store."""
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
    default_deadline_s: Positive | None = None
    """Longest deadline of its requests, where it is below `server.default_deadline_s`."""
