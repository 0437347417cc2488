"""Parse references to model versions: `chat`, `chat@stable`, `chat:v1`, `chat@sha256:…`."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

from triolet.errors import StoreError

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
"""A part of a repository's name in an OCI registry, so that it can be pushed unchanged."""
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""As in OCI registries."""
_ALIAS: Final = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
FORMS: Final = "NAME, NAME:TAG, NAME@ALIAS or NAME@sha256:DIGEST"


class PointerKind(StrEnum):
    """What kind of name points to a version."""

    TAG = "tag"
    ALIAS = "alias"


class Pointer(NamedTuple):
    """A tag or an alias of a model.

    Attributes:
      name: name of the model.
      kind: a tag is meant to stay, an alias to move.
      label: `v1`, `stable`.
    """

    name: str
    kind: PointerKind
    label: str

    def __str__(self) -> str:
        return f"{self.name}{':' if self.kind is PointerKind.TAG else '@'}{self.label}"


class Reference(NamedTuple):
    """A parsed reference to a version.

    Attributes:
      name: name of the model.
      pointer: the tag or alias, if one is named.
      digest: digest of the manifest, if it is named.
    """

    name: str
    pointer: Pointer | None = None
    digest: str | None = None

    def __str__(self) -> str:
        if self.pointer is not None:
            return str(self.pointer)
        return self.name if self.digest is None else f"{self.name}@{self.digest}"


def parse_reference(text: str) -> Reference:
    """Parse a reference.

    Raises:
      StoreError: its form is invalid.
    """
    name, at, behind = text.partition("@")
    if at:
        require_name(name)
        if DIGEST.fullmatch(behind):
            return Reference(name, digest=behind)
        if behind.startswith("sha256:"):
            raise StoreError(
                f"{text!r} has an invalid digest; allowed: sha256: and 64 digits 0-9 a-f; "
                "`triolet model list` shows digests"
            )
        return Reference(name, alias_of(name, behind))
    name, colon, tag = text.partition(":")
    require_name(name)
    return Reference(name, tag_of(name, tag)) if colon else Reference(name)


def is_reference(text: str) -> bool:
    """Return whether a text has the form of a reference."""
    try:
        parse_reference(text)
    except StoreError:
        return False
    return True


def require_name(name: str) -> str:
    """Check and return a model's name.

    Raises:
      StoreError: it is not a valid name; no path is made of it.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"{name!r} is not a model name; allowed: 1 to 63 of a-z 0-9 . _ - with a letter or "
            "digit "
            f"at both ends; a reference is {FORMS}"
        )
    return name


def tag_of(name: str, tag: str) -> Pointer:
    """Return a tag of a model.

    Raises:
      StoreError: its form is invalid.
    """
    if not _TAG.fullmatch(tag):
        raise StoreError(
            f"{tag!r} is not a tag; allowed: 1 to 128 of A-Z a-z 0-9 . _ - not beginning with . or "
            "-"
        )
    return Pointer(name, PointerKind.TAG, tag)


def alias_of(name: str, alias: str) -> Pointer:
    """Return an alias of a model.

    Raises:
      StoreError: its form is invalid.
    """
    if not _ALIAS.fullmatch(alias):
        raise StoreError(
            f"{alias!r} is not an alias; allowed: 1 to 63 of a-z 0-9 -, beginning with a letter "
            "and "
            "not ending with -, such as stable"
        )
    return Pointer(name, PointerKind.ALIAS, alias)
