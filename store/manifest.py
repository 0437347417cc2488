"""The content of a version: an OCI manifest with ModelPack's media types, and its config.

Equal files give equal bytes: keys are sorted, layers have a fixed order, and nothing depends on
machine, place or time. The digest of the bytes identifies the version.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec

from triolet.errors import StoreError

from .reference import DIGEST

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE: Final = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE: Final = "application/vnd.cncf.model.config.v1+json"
WEIGHT_TYPE: Final = "application/vnd.cncf.model.weight.v1.raw"
WEIGHT_CONFIG_TYPE: Final = "application/vnd.cncf.model.weight.config.v1.raw"
DOC_TYPE: Final = "application/vnd.cncf.model.doc.v1.raw"
TEMPLATE_TYPE: Final = "application/vnd.triolet.template.v1.raw"
"""Raw, ModelPack's word for files kept as they are: a template is Jinja, not JSON."""
SAMPLING_TYPE: Final = "application/vnd.triolet.sampling.v1+json"
POLICY_TYPE: Final = "application/vnd.triolet.policy.v1+json"
ENGINE_TYPE: Final = "application/vnd.triolet.engine.v1+json"
ORDER: Final = (
    WEIGHT_TYPE,
    WEIGHT_CONFIG_TYPE,
    TEMPLATE_TYPE,
    SAMPLING_TYPE,
    POLICY_TYPE,
    ENGINE_TYPE,
    DOC_TYPE,
)
"""Order of layers; those of one type are sorted by file name."""
FILE_PATH: Final = "org.cncf.model.filepath"
DTYPE: Final = "vnd.triolet.dtype"
"""Data type of most numbers in a weights file."""
TEMPLATE_FILES: Final = frozenset({"chat_template.jinja", "chat_template.json"})
SAMPLING_FILE: Final = "generation_config.json"
EMPTY_DOCUMENT: Final = b"{}"
"""OCI's config of artefacts without one."""
EMPTY_POLICY: Final = EMPTY_DOCUMENT
"""The empty rule pack."""
MAX_MANIFEST_BYTES: Final = 4 << 20
"""Minimum that OCI registries must accept: 4 MiB."""
MAX_LAYERS: Final = 4096
"""A model of several terabytes has some hundreds of shards."""
MAX_DOCUMENT_BYTES: Final = 16 << 20
"""Size of a config or a small layer, which are read whole; a chat template has a few kilobytes."""
FILE_NAME: Final = re.compile(r"(?:[0-9]{1,3}_[A-Za-z]{1,32}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A file of the directory, or of a numbered subfolder, as embedding models have."""

Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^{DIGEST.pattern}$", max_length=71)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    """A blob's entry in a manifest."""

    media_type: str
    digest: Digest
    size: Size
    annotations: dict[str, str] = {}

    @property
    def file_name(self) -> str | None:
        """Name of this blob's file in the model, if it has one."""
        return self.annotations.get(FILE_PATH)


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """The parsed manifest of a version."""

    schema_version: int
    media_type: str
    artifact_type: str
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], msgspec.Meta(max_length=MAX_LAYERS)]

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Config and layers."""
        return (self.config, *self.layers)

    def layer(self, media_type: str) -> Descriptor | None:
        """Return the first layer of a type."""
        return next((one for one in self.layers if one.media_type == media_type), None)


class Facts(NamedTuple):
    """Facts about the model in a version's config.

    Attributes:
      architecture: as in config.json.
      form: safetensors or gguf.
      precision: data type of most numbers.
      num_parameters: numbers in all tensors.
    """

    architecture: str
    form: str
    precision: str
    num_parameters: int


def canonical(document: Any) -> bytes:  # noqa: ANN401 (JSON)
    """Return the canonical form of a JSON document."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def digest_of(content: bytes) -> str:
    """Return a blob's digest."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def media_type_of(name: str) -> str | None:
    """Return the media type of a file in a model's directory that is not a weights file; None for
    files that Triolet does not use."""
    own = name.rpartition("/")[2]
    if name in TEMPLATE_FILES:
        return TEMPLATE_TYPE
    if name == SAMPLING_FILE:
        return SAMPLING_TYPE
    if own.upper().split(".")[0] in {"README", "LICENSE", "LICENCE", "NOTICE", "USE_POLICY"}:
        return DOC_TYPE
    if own.endswith(".json") or own in {"tokenizer.model", "merges.txt", "vocab.txt"}:
        return WEIGHT_CONFIG_TYPE
    return None


def file_layer(
    media_type: str, name: str | None, digest: str, size: int, dtype: str | None = None
) -> Descriptor:
    """Return a layer for a file."""
    annotations = {FILE_PATH: name, DTYPE: dtype}
    kept = {key: value for key, value in annotations.items() if value is not None}
    return Descriptor(media_type, digest, size, kept)


def in_order(layers: list[Descriptor]) -> list[Descriptor]:
    """Return layers in the manifest's order."""
    return sorted(layers, key=lambda one: (ORDER.index(one.media_type), one.file_name or ""))


def config_document(facts: Facts, layers: list[Descriptor]) -> bytes:
    """Return the bytes of a version's config, in ModelPack's format."""
    return canonical(
        {
            "descriptor": {},
            "config": {
                "architecture": facts.architecture,
                "format": facts.form,
                "paramSize": _param_size(facts.num_parameters),
                "precision": facts.precision,
            },
            "modelfs": {"type": "layers", "diffIds": [one.digest for one in layers]},
        }
    )


def manifest_document(config: bytes, layers: list[Descriptor]) -> bytes:
    """Return the bytes of a manifest."""
    named = Descriptor(CONFIG_TYPE, digest_of(config), len(config))
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": _plain(named),
            "layers": [_plain(one) for one in layers],
        }
    )


def read_manifest(content: bytes, digest: str, remedy: str = "import the model again") -> Manifest:
    """Parse a manifest, and check that all names in it are safe to use in paths.

    Args:
      content: its bytes.
      digest: for the error.
      remedy: for the error.

    Raises:
      StoreError: it is not a model's manifest, or contains an unsafe path.
    """
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"manifest {digest} cannot be read: {error}; {remedy}") from error
    if manifest.artifact_type != ARTIFACT_TYPE:
        raise StoreError(
            f"manifest {digest} is of type {manifest.artifact_type!r}, expected {ARTIFACT_TYPE}; "
            f"{remedy}"
        )
    seen = set()
    for layer in manifest.layers:
        if (name := layer.file_name) is None:
            continue
        if not FILE_NAME.fullmatch(name) or name in seen:
            raise StoreError(
                f"manifest {digest} names the file {name!r}, expected a plain file name, once; "
                "it was rejected: get the manifest from a source that you trust"
            )
        seen.add(name)
    return manifest


def _plain(descriptor: Descriptor) -> dict[str, Any]:
    found: dict[str, Any] = {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
    }
    if descriptor.annotations:
        found["annotations"] = dict(descriptor.annotations)
    return found


def _param_size(count: int) -> str:
    """Format a number of parameters with one decimal: 2.4M."""
    for letter, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return f"{count / 1000:.1f}K"
