"""Command-line options for settings: `--config`, `--set`, and named options such as `--port`.

NAMED lists the settings that have an option. Its type and default are those of the config field.
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
from triolet.home import expanded

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
CONTROL: Final = "control"


class Named(NamedTuple):
    """A setting with a named option.

    Attributes:
      path: path of the field that the option sets.
      panel: heading in the help.
      help: help text.
      default: default to show in the help, if the field's default explains little.
    """

    path: Path
    panel: str
    help: str
    default: str = ""


NAMED: Final = {
    "store": Named(("fleet", "store"), _MODEL, "Directory of the model store", "yours"),
    "device": Named(
        ("worker", "engine", "device"), _MODEL, "cpu, cuda, cuda:N; auto: a GPU if any"
    ),
    "dtype": Named(("worker", "engine", "dtype"), _MODEL, "float32, bfloat16, or the checkpoint's"),
    "backend": Named(("worker", "engine", "backend"), _MODEL, "native, sdpa, triton or flash"),
    "kv_pool": Named(
        ("worker", "engine", "kv_pool_bytes"), _MODEL, "KV cache per worker, such as 2GiB", "auto"
    ),
    "max_model_len": Named(
        ("worker", "engine", "max_model_len"), _MODEL, "Context length", "the model's"
    ),
    "max_num_seqs": Named(
        ("worker", "engine", "max_num_seqs"), _MODEL, "Sequences per decode step"
    ),
    "threads": Named(
        ("worker", "engine", "threads"), _MODEL, "CPU threads per worker", "its share"
    ),
    "host": Named(("server", "host"), _SERVER, "Address to listen on"),
    "port": Named(("server", "port"), _SERVER, "Port; 0: any free one"),
    MODEL_NAME: Named(("server", MODEL_NAME), _SERVER, "Public name; repeat: aliases", "folder's"),
    "tenants": Named(("server", "tenants", "file"), _SERVER, "Tenants file", "none"),
    "limits": Named(
        ("server", "tenants", "quotas", "limits"), _SERVER, "Quotas: redis://HOST, @FILE"
    ),
    "allow_remote_clients": Named(
        ("server", "allow_remote_clients"), _SERVER, "Allow clients on other machines"
    ),
    "trusted_proxies": Named(
        ("server", "trusted_proxies"), _SERVER, "Proxies' networks (CIDR)", "none"
    ),
    "allow_origin": Named(("server", "allow_origins"), _SERVER, "Allowed CORS origin", "none"),
    "no_generic_tools": Named(
        ("server", "generic_tools"), _SERVER, "No tools unless the template has them"
    ),
    "batch_dir": Named(
        ("server", "batches", "directory"), _SERVER, "Directory of files and batches", "none"
    ),
    "usage_dir": Named(
        ("server", "usage", "directory"), _SERVER, "Directory of the usage ledger", "none"
    ),
    "slo": Named(
        ("server", "objectives", "file"), _SERVER, "File of service level objectives", "shipped"
    ),
    "responses_ttl": Named(
        ("server", "responses", "ttl_s"), _SERVER, "Seconds to keep responses", "0: off"
    ),
    "servers": Named(("fleet", "servers"), _FLEET, "Servers that share the port"),
    "prefill": Named(("fleet", "prefill"), _FLEET, "Prefill workers, or 0"),
    "decode": Named(("fleet", "decode"), _FLEET, "Decode workers"),
    "memory": Named(
        ("control", "memory_bytes"),
        _FLEET,
        "Limit for the workers of all models, such as 24GiB",
        "auto",
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
    typer.Option(metavar="DIR", help="Directory of the audit log.", show_default="this user's"),
]
FleetPortOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, max=65_535, help="Port of the fleet, if several run here.")
]
ConfigOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings file (triolet.toml); - is stdin")
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Any field (`triolet config show`)"),
]


def with_settings(
    *names: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `--config`, `--set` and the given options of NAMED to a command.

    The command receives them merged, as the keyword argument `sources`.
    """

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
    """Merge the settings of a command line: a file, then `--set`, then named options.

    Raises:
      ConfigError: a setting is invalid.
    """
    sources = read_settings(config, assignments or ())
    for name, value in named.items():
        _add(sources, name, value)
    return sources


def add_models(sources: SettingSources, given: Sequence[str]) -> None:
    """Set the models given as arguments: one MODEL, or several as NAME=MODEL. With settings of
    control, one MODEL gets its public name, because control calls models by their names.

    Raises:
      ConfigError: a name is missing, invalid or used twice.
    """
    named: dict[str, str] = {}
    for text in given:
        name, is_named, ref = text.partition("=")
        if not is_named or FilePath(text).exists():
            if len(given) > 1:
                raise ConfigError(
                    f"{len(given)} models are given, and {text!r} has no public name; give each "
                    "one as NAME=MODEL, such as chat=demo"
                )
            given_sections = {path[0] for path, _, _ in sources.given}
            is_controlled = CONTROL in given_sections and MODELS not in given_sections
            own = (MODELS, _public_name(text), "ref") if is_controlled else ("fleet", "model")
            sources.add(own, text, f"the argument {text}")
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


def _public_name(model: str) -> str:
    """Return the name that a model without a name has for clients.

    Raises:
      ConfigError: control cannot use it.
    """
    path = expanded(FilePath(model))
    name = re.split("[:@]", model)[0]
    if path.exists():
        name = path.stem if path.is_file() else path.absolute().name
    require_model_name(name)
    return name


def option_name(name: str) -> str:
    """Return the option of a parameter, such as `--kv-pool` for `kv_pool`."""
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
        # Each option takes one line, so that the help fits on a screen.
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
    """Return a field's default as an operator would type it."""
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
    """Yield paths outside the sections `prefill` and `decode`, which repeat those of `worker`."""
    return (path for path in paths if path[0] not in ("prefill", "decode"))


@cache
def _written() -> dict[str, str]:
    """Map each unique field name to its option, or to its dotted path."""
    found: dict[str, str | None] = {}
    for path in _whole(leaves()):
        # A field named `models` would be mistaken for the section.
        is_other = path[-1] in found or path[-1] == MODELS
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
    """Replace field names in a message with the options or dotted paths that set them."""
    return _setting().sub(lambda match: _written()[match[0]], message)
