"""Finds the directory of a MODEL argument and checks that it can be served."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine.adapters.shapes import require_finite, require_shapes
from engine.model_config import load_model_config
from engine.preflight.check import (
    check_model,
    check_weights,
    chosen_device,
    most_common,
)
from store.gguf.directory import SUFFIX as GGUF_SUFFIX
from store.gguf.directory import WEIGHTS as GGUF_WEIGHTS
from store.gguf.directory import gguf_directory, gguf_weights
from store.model_dir.bounded import REMEDY, read_json
from store.model_dir.headers import read_header, read_headers, weight_files
from triolet.config import AUTO_BACKEND, LOOKUP, NO_GUESSES, TemplateConfig
from triolet.errors import ConfigError, ModelError
from triolet.home import expanded
from triolet.process import return_free_memory

from .fetch import is_kept, kept_file
from .known import AUTO, DEMO, KNOWN, SMOLLM2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from engine.preflight.check import CheckedModel
    from store.adapter_files import AdapterFiles
    from triolet.config import EngineConfig, ServerConfig, SpeculationConfig

WEIGHT_FILES: Final = ("*.safetensors", GGUF_WEIGHTS)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class CheckedDirectory(NamedTuple):
    """A model that can be served.

    Attributes:
      path: absolute path.
      model: result of the check.
    """

    path: Path
    model: CheckedModel


def check_start(
    model: str | Path | None, engine: EngineConfig, speculation: SpeculationConfig | None = None
) -> CheckedDirectory:
    """Find a model and check it against the settings of the workers. Used by `triolet serve` and
    `triolet doctor`.

    Args:
      model: MODEL argument; None for the demo model.
      engine: engine settings of the workers.
      speculation: settings with a draft model, if any, which is checked too.

    Raises:
      ConfigError: it cannot be served with these settings; the text says why and what to do.
    """
    with _readable():
        path = find_model(model)
        checked = CheckedDirectory(path, check_model(path, engine))
        if speculation is not None and speculation.source not in (NO_GUESSES, LOOKUP):
            _check_draft(speculation, engine)
    return checked


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{error.filename or 'the model'} cannot be read: {error.strerror}; let this user read "
            "it and its files"
        ) from error


def check_text(model_dir: Path) -> None:
    """Check the files of a model that a server reads.

    Raises:
      ModelError: a file is missing or broken.
    """
    for check in _checks_of_text():
        check(model_dir)
    return_free_memory()


def _checks_of_text() -> tuple[Callable[[Path], object], ...]:
    from server.text import model_files as read

    return (
        read.read_text_files,
        _check_templates,
        read.read_sampling_defaults,
        read.read_embedding_model,
        partial(read.read_page_words, has_chat_template=True),
    )


def _check_templates(model_dir: Path) -> None:
    from server.text.model_files import TOKENIZER_CONFIG, read_chat_templates, template_file
    from server.text.template import ChatTemplate

    config = read_json(model_dir / TOKENIZER_CONFIG, is_optional=True)
    templates = read_chat_templates(model_dir, config)
    try:
        ChatTemplate(templates, {}).require_compilable(TemplateConfig())
    except ModelError as error:
        raise ModelError(f"{template_file(model_dir, config)}: {error}") from error


def model_faults(model: str | Path | None, first: ConfigError) -> list[str]:
    """Return all reasons why a model cannot be served, without duplicates.

    Args:
      model: MODEL argument; None for the demo model.
      first: the error found by a check.
    """
    found = {str(first): None}
    for check in (load_model_config, *_checks_of_text(), _check_headers):
        try:
            with _readable():
                check(_directory(model))
        except ConfigError as error:
            found[str(error)] = None
    return list(found)


def _check_headers(model_dir: Path) -> None:
    if gguf_weights(model_dir) is None and _weights(model_dir):
        read_headers(weight_files(model_dir))


def check_adapter(model: Path, files: AdapterFiles) -> None:
    """Check an adapter against its base, as a worker does when it loads it.

    Raises:
      ModelError: its shapes do not match the base, or it has non-finite numbers.
    """
    require_shapes(files, load_model_config(model))
    require_finite(files)


def with_pool_share(engine: EngineConfig, num_workers: int, num_gpus: int) -> EngineConfig:
    """Return the settings of a worker with its share of the memory for KV pools. The configured
    share is that of each of two workers on one device."""
    is_spread = num_gpus > 0 and chosen_device(engine) == "cuda"  # with `cuda:1`, all share one GPU
    on_one_device = -(-num_workers // num_gpus) if is_spread else num_workers
    share = engine.kv_pool_memory_share * 2 / max(2, on_one_device)
    return replace(engine, kv_pool_memory_share=share)


def _check_draft(speculation: SpeculationConfig, engine: EngineConfig) -> None:
    pool_bytes = speculation.draft_pool_bytes
    own = replace(
        engine,
        backend=AUTO_BACKEND,
        kv_pool_bytes=pool_bytes,
        max_model_len=None,
        adapters=(),
    )
    try:
        check_model(Path(speculation.source), own)
        check_text(Path(speculation.source))
    except ConfigError as error:
        raise ConfigError(f"the draft model cannot be used: {error}") from error


def demo_model_path() -> Path:
    """Return the directory of the model that ships in the package."""
    return Path(str(files("triolet") / "demo"))


def find_model(model: str | Path | None) -> Path:
    """Return the directory of a model; None or "demo" is the demo model.

    Raises:
      ModelError: it is missing or has no weights; the text says what to do.
    """
    path = _directory(model)
    if not _weights(path):
        remedy = REMEDY
        if names := sorted(path.glob(f"*{GGUF_SUFFIX}")):
            remedy = f"give the GGUF file itself: {names[0]}"
        raise ModelError(
            f"{path} has no .safetensors file (weights in other formats are not loaded); {remedy}"
        )
    return path


def _directory(model: str | Path | None) -> Path:
    model = None if model is None else Path(model)
    if model is None or (str(model) == DEMO and not model.exists()):
        path = demo_model_path()
        remedy = "install Triolet again, or give a model directory"
    else:
        path = _written_down(expanded(model).absolute(), str(model))
        remedy = REMEDY
        if not path.exists() and _HUB_ID.fullmatch(str(model)):
            remedy = f"if it is a name on a hub, download it first: hf download {model} --local-dir"
            remedy += f" {path.name}, then give that directory"
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist; {remedy}")
    refuse_adapter(path, str(path))
    return path


def _weights(path: Path) -> list[Path]:
    return [file for kind in WEIGHT_FILES for file in path.glob(kind)]


def refuse_adapter(path: Path, named: str) -> None:
    """Check that a directory is not a LoRA adapter.

    Args:
      path: the directory.
      named: its name for the message.

    Raises:
      ModelError: it is a LoRA adapter.
    """
    if (path / "config.json").exists():
        return
    from store.adapter_files import CONFIG_FILE  # slow import, needed only here

    if (path / CONFIG_FILE).is_file():
        raise ModelError(
            f"{named} is a LoRA adapter, which needs its base model; give the base here, and the "
            "adapter in fleet.adapters or [models.NAME.adapters]"
        )


def shown_path(model_dir: Path) -> Path:
    """Return the path to show for a model directory: the GGUF file if it is made from one."""
    link = model_dir / GGUF_WEIGHTS
    return link.resolve() if link.is_symlink() else model_dir


def with_model_name(server: ServerConfig, model_dir: Path) -> ServerConfig:
    """Return the settings with the public name of the model, unless one is set: the name of a known
    model (with its file's name as an alias), or of the directory."""
    if server.model_name:
        return server
    for known in KNOWN.values():
        if shown_path(model_dir) == kept_file(known):
            aliases = (*server.model_aliases, model_dir.name)
            return replace(server, model_name=known.name, model_aliases=aliases)
    return replace(server, model_name=model_dir.name)


def _written_down(path: Path, name: str) -> Path:
    """Return the directory made from a GGUF file or a known model; any other path unchanged.

    Raises:
      ModelError: the file is missing or broken.
    """
    if not path.exists() and name == AUTO:
        path = kept_file(SMOLLM2) if is_kept(SMOLLM2) else demo_model_path()
    elif not path.exists() and (known := KNOWN.get(name)) is not None:
        if not is_kept(known):
            raise ModelError(f"{name} is not on this machine; `triolet serve {name}` downloads it")
        path = kept_file(known)
    if path.suffix != GGUF_SUFFIX or path.is_dir():
        return path
    if not path.is_file():
        raise ModelError(f"{path} does not exist; give the path of a GGUF file")
    return gguf_directory(path, _known_extra(path))


def _known_extra(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings that a known model's file lacks."""
    path = path.resolve()
    return next((one.extra for one in KNOWN.values() if kept_file(one).resolve() == path), {})


class CheckedFiles(NamedTuple):
    """A model with valid files, independent of the machine.

    Attributes:
      architecture: architecture in config.json.
      precision: dtype of most numbers.
      num_parameters: numbers in all tensors.
      dtypes: dtype of most tensors in each weights file, by file name.
    """

    architecture: str
    precision: str
    num_parameters: int
    dtypes: Mapping[str, str]


class GgufSource(NamedTuple):
    """The GGUF file behind a model directory.

    Attributes:
      path: path of the file.
      sampling: sampling defaults that Triolet adds to those in the file.
    """

    path: Path
    sampling: Mapping[str, Any]


def gguf_source(model_dir: Path) -> GgufSource | None:
    """Return the GGUF file that a directory was made from, or None."""
    path = gguf_weights(model_dir)
    if path is None:
        return None
    return GgufSource(path, _known_extra(path).get("generation_config.json", {}))


def weight_names(model_dir: Path) -> list[str]:
    """Return the names of a directory's safetensors files.

    Raises:
      ModelError: a file is missing, or the index names a file elsewhere.
    """
    return [path.name for path in weight_files(model_dir)]


def check_files(model_dir: Path) -> CheckedFiles:
    """Check a model as `check_start` does, except for what depends on the machine.

    Raises:
      ModelError: the model is broken, incomplete or unsupported.
    """
    with _readable():
        config = load_model_config(model_dir)
        weights = check_weights(config, model_dir)
        dtypes = {
            path.name: most_common(one.dtype for one in read_header(path).values())
            for path in weights.files
            if gguf_weights(model_dir) is None
        }
    return CheckedFiles(config.architecture, weights.dtype, weights.num_numbers, dtypes)
