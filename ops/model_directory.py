"""Which directory MODEL means, and whether it can be one, before any process is started for it.

Reads config.json, and of a GGUF file the metadata; weights and tokenizer are checked where they are
loaded.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

from triolet.errors import ModelError
from triolet.gguf.directory import SUFFIX as GGUF_SUFFIX
from triolet.gguf.directory import WEIGHTS as GGUF_WEIGHTS
from triolet.gguf.directory import gguf_directory

from .models.fetch import is_kept, kept_file
from .models.known import AUTO, KNOWN, SMOLLM2

WEIGHT_FILES: Final = ("*.safetensors", GGUF_WEIGHTS)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelDirectory(NamedTuple):
    """A directory that looks like a model.

    Attributes:
      path: absolute.
      architecture: as config.json names it.
      weight_bytes: size of all files of weights.
    """

    path: Path
    architecture: str
    weight_bytes: int


def demo_model_path() -> Path:
    """Return where the model that ships in the package is."""
    return Path(str(files("triolet") / "demo"))


def find_model(model: Path | None) -> ModelDirectory:
    """Return the directory of a model; None is the demo model.

    Raises:
      ModelError: it is missing or incomplete; the text says what is missing and what to do.
    """
    if model is None:
        path = demo_model_path()
        remedy = "install Triolet again, or name a model directory"
    else:
        path = _written_down(model.expanduser().absolute(), str(model))
        remedy = "point MODEL at a complete Hugging Face directory, or download it again"
        if not path.exists() and _HUB_ID.fullmatch(str(model)):
            remedy = f"if it is a name on a hub, download it first: hf download {model} --local-dir"
            remedy += f" {path.name}, then name that directory"
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist; {remedy}")
    architecture = _architecture(path / "config.json", remedy)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path / 'tokenizer.json'} is missing; {remedy}")
    weights = [file for kind in WEIGHT_FILES for file in sorted(path.glob(kind))]
    if not weights:
        if names := sorted(path.glob(f"*{GGUF_SUFFIX}")):
            remedy = f"name the GGUF file itself: {names[0]}"
        raise ModelError(
            f"{path} has no .safetensors file (weights in other formats are not loaded); {remedy}"
        )
    return ModelDirectory(path, architecture, sum(file.stat().st_size for file in weights))


def shown_path(model_dir: Path) -> Path:
    """Return what a person calls a model's directory: of a GGUF file, the file."""
    link = model_dir / GGUF_WEIGHTS
    return link.resolve() if link.is_symlink() else model_dir


def _written_down(path: Path, name: str) -> Path:
    """Return the directory of a GGUF file or of a known model; any other path as it is.

    Raises:
      ModelError: the file is missing or broken.
    """
    if not path.exists() and name == AUTO:
        path = kept_file(SMOLLM2) if is_kept(SMOLLM2) else demo_model_path()
    elif not path.exists() and (known := KNOWN.get(name)) is not None:
        if not is_kept(known):
            raise ModelError(
                f"{name} has not been fetched to this machine; `triolet serve {name}` fetches it"
            )
        path = kept_file(known)
    if path.suffix != GGUF_SUFFIX or path.is_dir():
        return path
    if not path.is_file():
        raise ModelError(f"{path} does not exist; give the path of a GGUF file")
    extra = next((known.extra for known in KNOWN.values() if kept_file(known) == path), None)
    return gguf_directory(path, extra)


def _architecture(path: Path, remedy: str) -> str:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; {remedy}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}; {remedy}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, not an object; {remedy}")
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    return str(config.get("model_type", "unknown"))
