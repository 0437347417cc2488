"""Tests of parsing references to versions and their manifests; no name ever becomes a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.layout import ModelStore
from store.manifest import canonical, read_manifest
from store.reference import is_reference, parse_reference
from triolet.errors import StoreError

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
PATHS = ("../x", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "a\nb", "-x", "Chat", "c" * 64, "é")


@pytest.mark.parametrize("text", ["chat", "chat:v1", "chat@stable", f"chat@{DIGEST}", "a.b_c-1:V"])
def test_a_reference_is_read_and_written_alike(text: str) -> None:
    assert str(parse_reference(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *PATHS,
        *(f"{path}:v1" for path in PATHS),
        *(f"chat:{path}" for path in PATHS if path not in {"Chat", "c" * 64}),
        *(f"chat@{path}" for path in PATHS),
        f"chat@{DIGEST}0",
        f"chat@{DIGEST[:-1]}",
        f"chat@{DIGEST.upper()}",
        f"chat@{DIGEST}\n",
        "chat:v1@stable",
    ],
)
def test_what_is_no_reference_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(StoreError, match="allowed"):
        parse_reference(text)
    assert not is_reference(text)


@pytest.mark.parametrize("digest", [f"{DIGEST}\n", "sha256:../../x", DIGEST.upper(), "", "x"])
def test_no_path_is_made_of_what_is_no_digest(digest: str) -> None:
    with pytest.raises(StoreError, match="no path is made"):
        ModelStore(Path("/nowhere")).blob_path(digest)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", "", "1_Pooling/../x", "a\nb", ".x"])
def test_a_manifest_that_names_a_path_is_refused(name: str) -> None:
    with pytest.raises(StoreError, match="expected a plain file name"):
        read_manifest(manifest(name), DIGEST)


def test_a_manifest_names_a_file_once() -> None:
    with pytest.raises(StoreError, match="once"):
        read_manifest(manifest("config.json", "config.json"), DIGEST)
    assert len(read_manifest(manifest("config.json", "1_Pooling/config.json"), DIGEST).layers) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", [{"mediaType": "x", "digest": "sha256:../x", "size": 1}]),
        ("layers", [{"mediaType": "x", "digest": DIGEST, "size": -1}]),
        ("artifactType", "application/vnd.oci.image.config.v1+json"),
        ("config", None),
    ],
)
def test_a_manifest_of_another_form_is_refused(field: str, value: object) -> None:
    document = canonical({**fields(), field: value})
    with pytest.raises(StoreError, match=f"manifest {DIGEST} .*import the model again"):
        read_manifest(document, DIGEST)


def manifest(*names: str) -> bytes:
    layers = [
        {
            "mediaType": "application/vnd.cncf.model.weight.config.v1.raw",
            "digest": DIGEST,
            "size": 1,
            "annotations": {"org.cncf.model.filepath": name},
        }
        for name in names
    ]
    return canonical({**fields(), "layers": layers})


def fields() -> dict[str, object]:
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": "application/vnd.cncf.model.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.cncf.model.config.v1+json",
            "digest": DIGEST,
            "size": 1,
        },
        "layers": [],
    }
