"""`triolet model import`: checks a model or a LoRA adapter and stores it as a version."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from server.text.model_files import SAMPLING_FILE, SamplingDefaults, sampling_defaults
from store.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from store.aliases import Aliases
from store.gguf.directory import WEIGHTS as GGUF_WEIGHTS
from store.ingest import Way, directory_files, ingest, source_file
from store.manifest import MAX_DOCUMENT_BYTES, WEIGHT_TYPE, Facts
from store.model_dir.bounded import parse_json, read_bytes, read_json, within_check_time
from store.reference import require_name, tag_of
from triolet.config import WeightFormat
from triolet.errors import ModelError
from triolet.home import expanded

from .model_directory import check_files, check_text, find_model, gguf_source, weight_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from store.ingest import SourceFile
    from store.layout import ModelStore

MODEL_CONFIG: Final = "config.json"
_OF_ADAPTERS: Final = (CONFIG_FILE, WEIGHTS_FILE)
MAX_SAMPLING_BYTES: Final = 64 << 10
"""Limit of a file of sampling defaults, which has six numbers."""


class WantedImport(NamedTuple):
    """Arguments of an import.

    Attributes:
      model: directory of a model or LoRA adapter, GGUF file, or demo.
      name: name of the model in the store.
      tag: tag of the version, or None.
      sampling: file with sampling defaults that replace the model's, or None.
      weights: format in which workers keep the weights in memory.
      may_link: hard-link files that the file system cannot clone.
    """

    model: str
    name: str
    tag: str | None
    sampling: Path | None
    weights: WeightFormat
    may_link: bool


class Imported(NamedTuple):
    """An imported version.

    Attributes:
      digest: digest of the version.
      num_bytes: bytes of its files by the way they were added (cloned, linked, copied, …).
      others: files in the directory that are not part of the version.
    """

    digest: str
    num_bytes: Mapping[Way, int]
    others: list[str]


def import_model(
    store: ModelStore, wanted: WantedImport, on_bytes: Callable[[int, int], None] | None = None
) -> Imported:
    """Check a model and store it as a version.

    Args:
      store: the model store.
      wanted: arguments of the import.
      on_bytes: called from any thread with the newly read and the total bytes.

    Raises:
      ConfigError: the model is broken, incomplete or unsupported, an argument is invalid, or the
        store cannot be written.
    """
    require_name(wanted.name)
    tag = None if wanted.tag is None else tag_of(wanted.name, wanted.tag)
    path = expanded(Path(wanted.model))
    parts = _of_adapter(path, wanted) if (path / CONFIG_FILE).is_file() else _of_model(wanted)
    total = sum(one.found.st_size for one in parts.files)
    with store.writing() as writer:
        result = ingest(
            writer,
            wanted.name,
            parts.files,
            parts.facts,
            sampling=parts.sampling,
            engine={"weights": wanted.weights.value},
            may_link=wanted.may_link,
            on_bytes=None if on_bytes is None else lambda count: on_bytes(count, total),
        )
        if tag is not None:
            Aliases(store).tag_new(tag, result.digest, "imported")
    return Imported(result.digest, result.num_bytes, parts.others)


class _Parts(NamedTuple):
    """The parts of a version.

    Attributes:
      files: files that become layers.
      others: files in the directory that do not.
      facts: facts for its config.
      sampling: sampling defaults; None for the model's.
    """

    files: list[SourceFile]
    others: list[str]
    facts: Facts
    sampling: Mapping[str, object] | None = None


@within_check_time()
def _of_adapter(path: Path, wanted: WantedImport) -> _Parts:
    """Check a LoRA adapter and return its parts."""
    if (path / MODEL_CONFIG).exists():
        raise ModelError(
            f"{path} has both {CONFIG_FILE} (of an adapter) and {MODEL_CONFIG} (of a model); "
            "import a copy without one of them"
        )
    if wanted.sampling is not None or wanted.weights is not WeightFormat.AUTO:
        raise ModelError(
            f"{path} is a LoRA adapter, which uses the sampling defaults and the weight format of "
            "its base; leave out --sampling and --weights"
        )
    # Record the state of every file before checking it, to detect concurrent changes.
    files, others = directory_files(path, {WEIGHTS_FILE: ""})
    others += [one.name for one in files if one.name not in _OF_ADAPTERS]
    kept = [one for one in files if one.name in _OF_ADAPTERS]
    found = read_adapter(path, "", sys.maxsize)
    precision = Counter(one.dtype for one in found.matrices.values()).most_common(1)[0][0]
    num_numbers = sum(prod(one.shape) for one in found.matrices.values())
    kept = [one._replace(dtype=precision) if one.name == WEIGHTS_FILE else one for one in kept]
    return _Parts(kept, sorted(others), Facts("LoRA", "safetensors", precision, num_numbers))


@within_check_time()
def _of_model(wanted: WantedImport) -> _Parts:
    """Check a model and return its parts."""
    own_fields = None if wanted.sampling is None else read_sampling(wanted.sampling)
    found = find_model(wanted.model)
    gguf = gguf_source(found)
    if gguf is not None and Path(wanted.model).is_dir():
        # Only the GGUF file becomes part of the version, not the directory's other files.
        raise ModelError(
            f"{wanted.model} has its weights in a GGUF file; give the file itself: {gguf.path}"
        )
    # Record the state of every file before checking it and again after reading it, to detect
    # concurrent changes.
    files: list[SourceFile]
    others: list[str] = []
    if gguf is None:
        files, others = directory_files(found, dict.fromkeys(weight_names(found), ""))
    else:
        # Use a fixed name: the version depends on the content, not on the file's name.
        files = [source_file(gguf.path, GGUF_WEIGHTS, WEIGHT_TYPE, gguf.path.parent.resolve())]
    checked = check_files(found)
    check_text(found)
    dtypes = checked.dtypes if gguf is None else {GGUF_WEIGHTS: checked.precision}
    files = [one._replace(dtype=dtypes.get(one.name)) for one in files]
    form = "safetensors" if gguf is None else "gguf"
    facts = Facts(checked.architecture, form, checked.precision, checked.num_parameters)
    sampling = None
    if gguf is not None:
        # The defaults in the GGUF file stay; these are added to them.
        sampling = {**gguf.sampling, **(own_fields or {})} or None
    elif own_fields is not None:
        sampling = {**_own_document(found), **own_fields}
    return _Parts(files, others, facts, sampling)


def read_sampling(path: Path) -> dict[str, Any]:
    """Read a file of sampling defaults.

    Raises:
      ModelError: it is malformed, or a field is unknown or invalid.
    """
    known = [one.name for one in fields(SamplingDefaults)]
    remedy = f"allowed: a JSON object of {', '.join(known)}"
    content = read_bytes(path, MAX_SAMPLING_BYTES, remedy)
    values = parse_json(path, content, MAX_SAMPLING_BYTES, remedy)
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object; {remedy}")
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise ModelError(f"{path} has an unknown field {unknown[0]!r}; {remedy}")
    sampling_defaults(path, values)
    return values


def _own_document(model_dir: Path) -> dict[str, Any]:
    """Read the model's sampling file, which was checked before."""
    path = model_dir / SAMPLING_FILE
    if path.exists() and path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise ModelError(f"{path} has more than {MAX_DOCUMENT_BYTES} bytes; shorten it")
    return read_json(path, is_optional=True)
