"""Uploads to registries and proxies of every habit."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from store.registry.blobs import Progress, upload
from store.registry.client import ATTEMPTS, Registry
from store.registry.location import parse_location
from triolet.errors import RegistryFailed

from .lying_registry import Lie

if TYPE_CHECKING:
    from store.manifest import Descriptor

    from .lying_registry import Asked, LyingRegistry

CHUNK = 131_072
SESSION = "/v2/chat/blobs/uploads/1"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the weights have three."""
    monkeypatch.setattr("store.registry.blobs.CHUNK_BYTES", CHUNK)
    monkeypatch.setattr("store.registry.blobs.MIN_CHUNK_BYTES", CHUNK // 4)


@pytest.fixture
def weights(liar: LyingRegistry) -> Descriptor:
    """The largest blob; the registry takes uploads."""
    liar.lie("/blobs/uploads/", Lie(202, b"", {"location": SESSION}), "POST")
    liar.lie(SESSION, Lie(202), "PATCH")
    found = max(liar.manifest.blobs, key=lambda one: one.size)
    liar.lie(f"{SESSION}?digest={found.digest}", Lie(201), "PUT")
    return found


def uploaded(liar: LyingRegistry, blob: Descriptor) -> list[str]:
    """Upload a blob and return the ranges of all requests with bytes of it."""
    with closing(Registry(parse_location(liar.location), None)) as asked:
        upload(asked, blob, liar.store.blob_path(blob.digest), Progress(lambda _: None))
    return ranges(liar)


def ranges(liar: LyingRegistry) -> list[str]:
    return [one.headers["content-range"] for one in liar.asked if one.method == "PATCH"]


def test_a_blob_goes_in_chunks(liar: LyingRegistry, weights: Descriptor) -> None:
    last = weights.size - 1
    assert uploaded(liar, weights) == ["0-131071", "131072-262143", f"262144-{last}"]


def test_a_proxy_that_takes_small_bodies_only_gets_small_chunks(
    liar: LyingRegistry, weights: Descriptor
) -> None:
    def limited(asked: Asked) -> Lie | None:
        return Lie(413) if int(asked.headers["content-length"]) > CHUNK // 4 else Lie(202)

    liar.lie(SESSION, limited, "PATCH")
    found = uploaded(liar, weights)
    assert found[:4] == ["0-131071", "0-65535", "0-32767", "32768-65535"]
    assert found[-1].endswith(f"-{weights.size - 1}")
    liar.lie(SESSION, Lie(413), "PATCH")
    with pytest.raises(RegistryFailed, match="takes no body of this size: raise its limit"):
        uploaded(liar, weights)


def test_a_registry_says_how_small_chunks_may_be(liar: LyingRegistry, weights: Descriptor) -> None:
    least = {"location": SESSION, "oci-chunk-min-length": "200000"}
    liar.lie("/blobs/uploads/", Lie(202, b"", least), "POST")
    assert uploaded(liar, weights) == ["0-199999", f"200000-{weights.size - 1}"]


def test_an_upload_goes_on_where_the_registry_has_it(
    liar: LyingRegistry, weights: Descriptor
) -> None:
    liar.lie(SESSION, lambda _: Lie(502) if len(ranges(liar)) == 2 else Lie(202), "PATCH")
    liar.lie(SESSION, Lie(204, b"", {"range": "0-149999", "location": f"{SESSION}?at=150000"}))
    liar.lie(f"{SESSION}?at=150000", Lie(202), "PATCH")
    liar.lie(f"{SESSION}?at=150000&digest={weights.digest}", Lie(201), "PUT")
    found = uploaded(liar, weights)
    assert found == ["0-131071", "131072-262143", "150000-281071", f"281072-{weights.size - 1}"]


@pytest.mark.parametrize("status", [Lie(404), Lie(204, b"", {"range": "0-0"})])
def test_an_upload_that_the_registry_has_forgotten_begins_anew(
    liar: LyingRegistry, weights: Descriptor, status: Lie
) -> None:
    liar.lie(SESSION, lambda _: Lie(502) if len(ranges(liar)) == 2 else Lie(202), "PATCH")
    liar.lie(SESSION, status)
    assert uploaded(liar, weights)[:3] == ["0-131071", "131072-262143", "0-131071"]


def test_an_upload_that_never_gets_on_ends(liar: LyingRegistry, weights: Descriptor) -> None:
    liar.lie(SESSION, Lie(503), "PATCH")
    liar.lie(SESSION, Lie(404))
    with pytest.raises(RegistryFailed, match="refused with status 503"):
        uploaded(liar, weights)
    assert len(ranges(liar)) == ATTEMPTS


def test_a_lost_answer_to_the_end_ends_the_upload_all_the_same(
    liar: LyingRegistry, weights: Descriptor
) -> None:
    liar.lie(f"{SESSION}?digest={weights.digest}", Lie(404), "PUT")
    uploaded(liar, weights)
    size = {"content-length": "1"}
    liar.lie(f"/blobs/{weights.digest}", Lie(200, b"x", size), "HEAD")
    with pytest.raises(RegistryFailed, match=f"has 1 bytes there, expected {weights.size}"):
        uploaded(liar, weights)


def test_what_is_no_registry_is_named(liar: LyingRegistry, weights: Descriptor) -> None:
    liar.lie("/blobs/uploads/", Lie(202), "POST")
    with pytest.raises(RegistryFailed, match=r"does not say where the upload of .* goes"):
        uploaded(liar, weights)
