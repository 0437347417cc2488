"""Tests of parsing references to registries, valid and invalid ones."""

from __future__ import annotations

import pytest

from store.registry.location import parse_location
from triolet.errors import StoreError

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("text", "name", "is_near"),
    [
        ("oci://registry.example/a/b-c/chat:v1", "chat", False),
        (f"oci://127.0.0.1:5000/chat@{DIGEST}", "chat", True),
        ("oci://localhost/chat:V_1.2", "chat", True),
        ("oci://[::1]:5000/chat:v1", "chat", True),
        ("oci://[2001:db8::1]/chat:v1", "chat", False),
    ],
)
def test_a_reference_is_read_and_written_alike(text: str, name: str, is_near: bool) -> None:
    found = parse_location(text)
    assert str(found) == text
    assert (found.model_name, found.is_on_loopback) == (name, is_near)


@pytest.mark.parametrize(
    "text",
    [
        "registry.example/chat:v1",
        "oci:///chat:v1",
        "oci://host",
        "oci://host:0/chat:v1",
        "oci://host:99999/chat:v1",
        "oci://host:999999/chat:v1",
        "oci://ho st/chat:v1",
        "oci://host/Chat:v1",
        "oci://host/a//b:v1",
        "oci://host/../b:v1",
        "oci://host/chat",
        f"oci://host/chat:v1@{DIGEST}",
        "oci://host/chat@sha256:12",
        "oci://host/chat:-x",
        "oci://host/chat:v1/../x",
        f"oci://host/{'a' * 256}:v1",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match="is not a version in a registry; allowed: oci://HOST"):
        parse_location(text)


def test_a_password_in_a_reference_is_refused_and_not_repeated() -> None:
    with pytest.raises(StoreError, match="give --username NAME") as failed:
        parse_location("oci://alice:secret@host/chat:v1")
    assert "secret" not in str(failed.value)
