"""Parse the location of a version in a registry: `oci://HOST[:PORT]/REPOSITORY:TAG` or
`…@sha256:DIGEST`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from triolet.errors import StoreError
from triolet.loopback import is_loopback

from ..reference import DIGEST

FORMS: Final = (
    "oci://HOST[:PORT]/REPOSITORY:TAG or oci://HOST[:PORT]/REPOSITORY@sha256:DIGEST, with a "
    "repository of parts of a-z 0-9 . _ -, and a tag of up to 128 of A-Z a-z 0-9 . _ -"
)
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PLACE: Final = re.compile(
    r"oci://(?P<host>(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9a-fA-F:]{2,39}\])(?::(?P<port>[0-9]{1,5}))?)"
    rf"/(?P<repository>(?=[^:@]{{1,255}}[:@]){_PART}(?:/{_PART})*)"
    rf"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})|@(?P<digest>{DIGEST.pattern}))"
)
"""Repository and tag as in the OCI distribution specification."""


class Location(NamedTuple):
    """A manifest in a registry.

    Attributes:
      host: with its port, as in credentials.
      repository: repository in the registry.
      tag: tag of the manifest, unless its digest is named.
      digest: digest of the manifest, if it is named.
    """

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        end = f"@{self.digest}" if self.tag is None else f":{self.tag}"
        return f"oci://{self.host}/{self.repository}{end}"

    @property
    def reference(self) -> str:
        """Tag or digest, as used in the registry's URLs."""
        return self.tag or self.digest or ""

    @property
    def model_name(self) -> str:
        """The last part of the repository: default name of the model."""
        return self.repository.rpartition("/")[2]

    @property
    def is_on_loopback(self) -> bool:
        """Return whether no other machine can read the traffic with the registry."""
        return is_loopback(re.sub(r":[0-9]+$", "", self.host))

    def at(self, digest: str) -> Location:
        """Return the location of a manifest by digest, which never changes."""
        return Location(self.host, self.repository, digest=digest)


def parse_location(text: str) -> Location:
    """Parse a location.

    Raises:
      StoreError: its form is invalid. The message never repeats what may be a password.
    """
    if "@" in text.removeprefix("oci://").partition("/")[0]:
        raise StoreError(
            "the registry's host is preceded by a user name, but every user of this machine can "
            "read arguments: give --username NAME and the password on standard input, or set "
            "TRIOLET_REGISTRY_USERNAME and TRIOLET_REGISTRY_PASSWORD"
        )
    found = _PLACE.fullmatch(text)
    if found is None or int(found["port"] or 1) not in range(1, 65_536):
        raise StoreError(f"{text!r} is not a version in a registry; allowed: {FORMS}")
    return Location(found["host"], found["repository"], found["tag"], found["digest"])
