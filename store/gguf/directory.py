"""Make a model directory for a GGUF file: small files in the user's cache, with a link to the file.

Model loaders read a directory of config.json, tokenizer.json and weights. The weights stay in the
GGUF file; the other files are written once and reused while the file's metadata is unchanged. Such
a directory may be removed at any time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triolet.errors import ModelError
from triolet.home import cache_home

from .config import generation_config, model_config
from .container import read_gguf
from .tokenizer import tokenizer_config, tokenizer_document

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .container import GgufFile

SUFFIX: Final = ".gguf"
WEIGHTS: Final = f"model{SUFFIX}"
"""Name of the link to the file."""
FORM: Final = 1
"""Version of the written files; a release that writes different ones increases it."""


def gguf_directory(path: Path, extra: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """Return the model directory of a GGUF file; write it if it does not exist.

    Args:
      path: path of the file.
      extra: fields that replace or complete those of the written files, by file name.

    Raises:
      ModelError: the file is broken or of an unsupported kind, or the cache cannot be written.
    """
    path = path.resolve()
    file = read_gguf(path)
    named = json.dumps([FORM, str(path), file.header_digest, extra or {}], sort_keys=True)
    key = hashlib.sha256(named.encode()).hexdigest()[:32]
    caches = cache_home() / "triolet" / "gguf"
    directory = caches / key / path.stem
    if (directory / WEIGHTS).exists():
        return directory
    documents = _documents(file, extra or {})
    try:
        caches.mkdir(parents=True, exist_ok=True)
        _remove_orphans(caches)
        _write(caches, directory, path, documents)
    except OSError as error:
        raise ModelError(
            f"cannot write {directory}, which describes {path}: {error.strerror}; make room there, "
            "or set XDG_CACHE_HOME to a directory that you can write to"
        ) from error
    return directory


def gguf_weights(model_dir: Path) -> Path | None:
    """Return the GGUF file of a model directory; None if its weights are safetensors."""
    path = model_dir / WEIGHTS
    if not path.exists() or any(model_dir.glob("model.safetensors*")):
        return None
    return path.resolve()


def _documents(file: GgufFile, extra: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    documents = {
        "config.json": model_config(file),
        "generation_config.json": generation_config(file),
        "tokenizer_config.json": tokenizer_config(file),
        "tokenizer.json": tokenizer_document(file),
    }
    for name, fields in extra.items():
        documents[name] = {**documents.get(name, {}), **fields}
    return documents


def _write(caches: Path, directory: Path, path: Path, documents: Mapping[str, Any]) -> None:
    """Write the directory atomically; another process may write it at the same time."""
    unfinished = Path(tempfile.mkdtemp(prefix="new-", dir=caches))
    try:
        inner = unfinished / directory.name
        inner.mkdir()
        for name, document in documents.items():
            text = json.dumps(document, ensure_ascii=False)
            (inner / name).write_text(text, encoding="utf-8")
        (inner / WEIGHTS).symlink_to(path)
        try:
            unfinished.rename(directory.parent)
        except OSError:
            if not (directory / WEIGHTS).exists():
                raise
            shutil.rmtree(unfinished)  # another process was first
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove_orphans(caches: Path) -> None:
    """Remove the directories of files that no longer exist."""
    for keyed in tuple(caches.iterdir()):
        with suppress(FileNotFoundError, NotADirectoryError):  # another process removed it first
            weights = [directory / WEIGHTS for directory in keyed.iterdir()]
            if any(link.is_symlink() and not link.exists() for link in weights):
                shutil.rmtree(keyed, ignore_errors=True)
