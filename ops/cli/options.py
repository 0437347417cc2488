"""The options of `triolet serve`: names for the settings that operators use daily.

Everything else is set by `--set` or by a file. An option's type and default are those of its field.
"""

from __future__ import annotations

import inspect
import re
from enum import StrEnum
from functools import cache
from pathlib import Path as FilePath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    get_origin,
)

import typer

from triolet.config import ANY_MODEL
from triolet.errors import ConfigError

from ..settings.form import (
    MODELS,
    Settings,
    dotted,
    leaves,
    require_model_name,
    show,
    value_at,
    without_none,
)
from ..settings.sources import SettingSources, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ..settings.form import Path, Value

_MODEL: Final = "Model and compute"
_SERVER: Final = "Server"
_FLEET: Final = "Fleet"
MODEL_NAME: Final = "model_name"


class Named(NamedTuple):
    """An option of its own.

    Attributes:
      path: of the field that it sets.
      panel: of the help.
      help: of the option.
      default: as shown, where the field's own says little.
    """

    path: Path
    panel: str
    help: str
    default: str = ""


NAMED: Final = {
    "store": Named(("fleet", "store"), _MODEL, "Model store, where MODEL is a version", "yours"),
    "device": Named(("worker", "engine", "device"), _MODEL, "cpu, cuda, cuda:N, or a GPU if any"),
    "dtype": Named(("worker", "engine", "dtype"), _MODEL, "float32, bfloat16, or the checkpoint's"),
    "backend": Named(("worker", "engine", "backend"), _MODEL, "native, sdpa, triton or flash"),
    "kv_pool": Named(
        ("worker", "engine", "kv_pool_bytes"), _MODEL, "KV pool of a worker, such as 2GiB", "auto"
    ),
    "max_model_len": Named(
        ("worker", "engine", "max_model_len"), _MODEL, "Context length", "the model's"
    ),
    "max_num_seqs": Named(("worker", "engine", "max_num_seqs"), _MODEL, "Rows of a decode step"),
    "threads": Named(
        ("worker", "engine", "threads"), _MODEL, "CPU threads of a worker", "its share"
    ),
    "host": Named(("server", "host"), _SERVER, "Address to listen on"),
    "port": Named(("server", "port"), _SERVER, "Port, or 0 for any free one"),
    MODEL_NAME: Named(("server", MODEL_NAME), _SERVER, "Repeated: aliases", "folder's"),
    "tenants": Named(("server", "tenants", "file"), _SERVER, "File of tenants", "none"),
    "limits": Named(
        ("server", "tenants", "quotas", "limits"), _SERVER, "memory, redis://HOST, @FILE"
    ),
    "allow_remote_clients": Named(
        ("server", "allow_remote_clients"), _SERVER, "Listen beyond this machine"
    ),
    "trusted_proxies": Named(
        ("server", "trusted_proxies"), _SERVER, "Networks (CIDR) of proxies", "none"
    ),
    "allow_origin": Named(
        ("server", "allow_origins"), _SERVER, "Origin of pages that may ask", "none"
    ),
    "no_generic_tools": Named(
        ("server", "generic_tools"), _SERVER, "No tools where the template shows none"
    ),
    "batch_dir": Named(
        ("server", "batches", "directory"), _SERVER, "Folder of files and batches", "none"
    ),
    "usage_dir": Named(
        ("server", "usage", "directory"), _SERVER, "Folder of the usage ledger", "none"
    ),
    "responses_ttl": Named(
        ("server", "responses", "ttl_s"), _SERVER, "Seconds to keep responses", "0: off"
    ),
    "servers": Named(("fleet", "servers"), _FLEET, "Servers that share the port"),
    "prefill": Named(("fleet", "prefill"), _FLEET, "Prefill workers, or 0"),
    "decode": Named(("fleet", "decode"), _FLEET, "Decode workers"),
    "memory": Named(
        ("control", "memory_bytes"), _FLEET, "Of all models with names, such as 24GiB", "auto"
    ),
    "log_level": Named(("process", "log_level"), _FLEET, "debug, info, warning, error", "info"),
}
"""Parameters of `serve` and the fields that they set."""
COMPUTE: Final = tuple(name for name, option in NAMED.items() if option.panel == _MODEL)

ModelArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Directory, GGUF file, demo, smollm2, auto, chat@stable",
        show_default=False,
    ),
]
ModelsArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=]MODEL",
        help="Directory, GGUF file, demo, smollm2, auto, chat@stable; several with names",
        show_default=False,
    ),
]
AuditOption: TypeAlias = Annotated[
    FilePath | None,
    typer.Option(metavar="DIR", help="The audit log.", show_default="this user's"),
]
FleetPortOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, max=65_535, help="Of the fleet, if several run here.")
]
ConfigOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings (triolet.toml); - is stdin")
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Any other: `triolet config show`"),
]


def with_settings(
    *names: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `--config`, `--set` and options of NAMED, and their Sources as `sources`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        named = [_parameter(name, NAMED[name]) for name in names]
        own = [
            one
            for one in inspect.signature(command, eval_str=True).parameters.values()
            if one.name != "sources"
        ]
        common = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in (("config", ConfigOption), ("assignments", SetOption))
        ]

        def run(
            config: str | None,
            assignments: list[str] | None,
            **values: Value,
        ) -> None:
            named = {name: values.pop(name) for name in names}
            command(sources=gather(config, assignments, named), **values)

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        parameters += [*common, *named]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def gather(
    config: str | None, assignments: Iterable[str] | None, named: Mapping[str, Value]
) -> SettingSources:
    """Return what a command line says: a file, then `--set`, then options of their own.

    Raises:
      ConfigError: something of it cannot be.
    """
    sources = read_settings(config, assignments or ())
    for name, value in named.items():
        _add(sources, name, value)
    return sources


def add_models(sources: SettingSources, given: Sequence[str]) -> None:
    """Set the models that the arguments of a command name: one, or several as NAME=MODEL.

    Raises:
      ConfigError: they cannot be together.
    """
    named: dict[str, str] = {}
    for text in given:
        name, is_named, ref = text.partition("=")
        if not is_named or FilePath(text).exists():
            if len(given) > 1:
                raise ConfigError(
                    f"{len(given)} models are named, and {text!r} has no name for requests; give "
                    "each one as NAME=MODEL, such as chat=demo"
                )
            sources.add(("fleet", "model"), text, f"the argument {text}")
            return
        require_model_name(name)
        if not ref:
            raise ConfigError(f"{text!r} names no model; give {name}=MODEL")
        if name in named:
            raise ConfigError(
                f"two models are called {name}: {named[name]} and {ref}; give each its own name"
            )
        named[name] = ref
        sources.add((MODELS, name, "ref"), ref, f"the argument {text}")


def option_name(name: str) -> str:
    """Return a parameter's option."""
    return f"--{name.replace('_', '-')}"


def _parameter(name: str, option: Named) -> inspect.Parameter:
    kind: Any = without_none(leaves()[option.path])
    origin: object = get_origin(kind)
    is_size = kind is int and option.path[-1].endswith("_bytes")
    default: Any = None
    if origin is tuple or name == MODEL_NAME:
        kind = list[str] | None
    elif kind is bool:
        default = False
    else:
        kind = (str if is_size else kind) | None
    declarations = (option_name(name),) if kind is bool else ()
    shown = option.default or shown_default(option.path)
    annotation = Annotated[
        kind,
        # One line each, so that the help fits on a screen.
        typer.Option(
            *declarations,
            help=option.help if kind is bool else f"{option.help} ({shown})",
            rich_help_panel=option.panel,
            metavar=None if kind is bool else "N" if kind == int | None else "WORD",
            show_default=False,
        ),
    ]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def shown_default(path: Path) -> str:
    """Return the default of a field as an operator writes it."""
    return show(value_at(Settings(), path))


def _add(sources: SettingSources, name: str, value: Value) -> None:
    option, path = option_name(name), NAMED[name].path
    if value is None or value is False or value == []:
        return
    given = value if isinstance(value, list) else [] if value is True else [value]
    sources.words += [word for one in given for word in (option, str(one))] or [option]
    if name == MODEL_NAME:
        names = [one for one in dict.fromkeys(value) if one != ANY_MODEL]
        aliases = (*names[1:], *((ANY_MODEL,) if ANY_MODEL in value else ()))
        if names:
            sources.add(path, names[0], option)
        sources.add(("server", "model_aliases"), aliases, option)
    elif isinstance(value, list):
        words = [word.strip() for one in value for word in one.split(",")]
        sources.add(path, tuple(dict.fromkeys(word for word in words if word)), option)
    elif isinstance(value, str) and not isinstance(value, StrEnum):
        sources.add_text(path, value, option)
    else:
        sources.add(path, False if name.startswith("no_") else value, option)


def _whole(paths: Collection[Path]) -> Iterator[Path]:
    """Yield paths without the sections of one kind of worker, which repeat those of both."""
    return (path for path in paths if path[0] not in ("prefill", "decode"))


@cache
def _written() -> dict[str, str]:
    """Return how each field whose name is its alone is set, by this name."""
    found: dict[str, str | None] = {}
    for path in _whole(leaves()):
        is_other = path[-1] in found or path[-1] == MODELS  # which is the section of that name
        found[path[-1]] = None if is_other else dotted(path)
    written = {name: text for name, text in found.items() if text is not None}
    return written | {one.path[-1]: option_name(name) for name, one in NAMED.items()}


@cache
def _setting() -> re.Pattern[str]:
    """Return what finds names of fields in a message. Only errors need it: it takes 10 ms."""
    plain = (name for name in _written() if "_" not in name)
    return re.compile(
        rf"(?<![\w/.-])(?:{'|'.join(name for name in _written() if '_' in name)})(?![\w/.-])"
        rf"|(?:^|(?<=: )|(?<=use )|(?<=which )|(?<=with ))(?:{'|'.join(plain)})(?= is | ')"
    )


def as_typed(message: str) -> str:
    """Return a message about settings with the options or paths by which they are set."""
    return _setting().sub(lambda match: _written()[match[0]], message)
