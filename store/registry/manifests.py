"""Manifests of a registry: read and written as bytes, by tag or digest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.errors import RegistryFailed

from ..manifest import MANIFEST_TYPE, digest_of
from ..reference import DIGEST

if TYPE_CHECKING:
    from .client import Registry

INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
DIGEST_HEADER: Final = "docker-content-digest"
_ACCEPTED: Final = ", ".join(
    (
        MANIFEST_TYPE,
        # So that a registry says what is there instead, and not that nothing is.
        INDEX_TYPE,
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    )
)


def fetch_manifest(registry: Registry, reference: str) -> bytes:
    """Return the bytes of a manifest.

    Args:
      registry: that has it.
      reference: its tag or digest.

    Raises:
      RegistryFailed: there is none, or it has another digest.
    """
    found = find_manifest(registry, reference, allowed=frozenset({200}))
    assert found is not None, "any other status is an error"
    return found


def find_manifest(
    registry: Registry, reference: str, allowed: frozenset[int] = frozenset({200, 404})
) -> bytes | None:
    """Return the bytes of a manifest, None if there is none.

    Args:
      registry: that may have it.
      reference: its tag or digest.
      allowed: statuses that are no error.

    Raises:
      RegistryFailed: it is refused, or has another digest.
    """
    what = f"manifest {reference}"
    path = f"manifests/{reference}"
    answer = registry.call("GET", path, what, allowed, headers={"accept": _ACCEPTED})
    if answer.status != 200:
        return None
    found = digest_of(answer.content)
    named = reference if DIGEST.fullmatch(reference) else None
    for expected in (named, answer.headers.get(DIGEST_HEADER)):
        if expected is not None and expected != found:
            raise RegistryFailed(
                f"{registry}: what it sends as {what} has the digest {found}, expected {expected}; "
                "it is not used: have the registry's operator look at it"
            )
    return answer.content


def put_manifest(
    registry: Registry, reference: str, content: bytes, media_type: str = MANIFEST_TYPE
) -> bool:
    """Give a manifest its place; return whether the registry lists it at its subject by itself.

    Raises:
      RegistryFailed: it is refused, or kept as something else.
    """
    answer = registry.call(
        "PUT",
        f"manifests/{reference}",
        f"manifest {reference}",
        {201},
        headers={"content-type": media_type},
        content=content,
    )
    digest = digest_of(content)
    kept = answer.headers.get(DIGEST_HEADER, digest)
    if kept != digest:
        raise RegistryFailed(
            f"{registry}: it has kept manifest {reference} as {kept}, expected {digest}; it "
            "changes manifests and cannot keep versions: push to another registry"
        )
    return "oci-subject" in answer.headers
