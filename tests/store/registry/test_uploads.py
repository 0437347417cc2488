"""Tests of uploading blobs to registries and through proxies that behave differently."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from store.registry.blobs import upload
from store.registry.client import ATTEMPTS, Registry
from store.registry.credentials import Credentials
from store.registry.location import parse_location
from triolet.errors import RegistryFailed

from .lying_registry import Lie

if TYPE_CHECKING:
    from store.manifest import Descriptor

    from .lying_registry import Asked, LyingRegistry

SESSION = "/v2/chat/blobs/uploads/1"


@pytest.fixture
def weights(liar: LyingRegistry) -> Descriptor:
    """The largest blob, in a registry that accepts uploads."""
    liar.lie("/blobs/uploads/", Lie(202, b"", {"location": SESSION}), "POST")
    found = max(liar.manifest.blobs, key=lambda one: one.size)
    liar.lie(f"{SESSION}?digest={found.digest}", Lie(201), "PUT")
    return found


def uploaded(
    liar: LyingRegistry, blob: Descriptor, credentials: Credentials | None = None
) -> list[Asked]:
    """Upload a blob and return all requests that carried its bytes."""
    with closing(Registry(parse_location(liar.location), credentials)) as asked:
        upload(asked, blob, liar.store.blob_path(blob.digest), lambda _: None)
    return sent(liar)


def sent(liar: LyingRegistry) -> list[Asked]:
    return [one for one in liar.asked if one.method == "PUT"]


def test_an_upload_that_breaks_off_is_sent_again(liar: LyingRegistry, weights: Descriptor) -> None:
    liar.lie(f"/blobs/{weights.digest}", Lie(404), "HEAD")
    liar.lie(
        f"{SESSION}?digest={weights.digest}",
        lambda _: Lie(502) if len(sent(liar)) == 1 else Lie(201),
        "PUT",
    )
    lengths = [one.headers["content-length"] for one in uploaded(liar, weights)]
    assert lengths == [str(weights.size)] * 2
    methods = [one.method for one in liar.asked]
    assert methods == ["POST", "PUT", "HEAD", "POST", "PUT"], "each in a session of its own"


def test_an_upload_that_never_gets_on_ends(liar: LyingRegistry, weights: Descriptor) -> None:
    liar.lie(f"{SESSION}?digest={weights.digest}", Lie(503), "PUT")
    liar.lie(f"/blobs/{weights.digest}", Lie(404), "HEAD")
    with pytest.raises(RegistryFailed, match="refused with status 503"):
        uploaded(liar, weights)
    assert len(sent(liar)) == ATTEMPTS


def test_a_proxy_that_takes_small_bodies_only_is_named(
    liar: LyingRegistry, weights: Descriptor
) -> None:
    liar.lie(f"{SESSION}?digest={weights.digest}", Lie(413), "PUT")
    liar.lie(f"/blobs/{weights.digest}", Lie(404), "HEAD")
    with pytest.raises(RegistryFailed, match="refuses a body of this size: raise its limit"):
        uploaded(liar, weights)
    assert len(sent(liar)) == 1


def test_a_blob_that_is_sent_elsewhere_takes_no_password_along(
    liar: LyingRegistry, weights: Descriptor
) -> None:
    def begun(asked: Asked) -> Lie:
        if "authorization" not in asked.headers:
            return Lie(401, b"", {"www-authenticate": 'Basic realm="x"'})
        # The same server under another name counts as another place for credentials.
        return Lie(202, b"", {"location": f"http://localhost:{liar.server_port}{SESSION}"})

    liar.lie("/blobs/uploads/", begun, "POST")
    (one,) = uploaded(liar, weights, Credentials("alice", "secret", "a test"))
    assert "authorization" not in one.headers


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
    with pytest.raises(RegistryFailed, match=r"names no place for the upload of"):
        uploaded(liar, weights)
