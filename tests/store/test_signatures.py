"""Tests of signatures of versions in the store: their content, how to check them, and where one is
required."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sqlite3
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ops.cli import main
from ops.models.stored import with_stored_model
from ops.settings.form import Settings
from store.aliases import Aliases
from store.collect import collect, remove
from store.layout import Referrer
from store.manifest import canonical
from store.reference import alias_of, parse_reference
from store.referrers import (
    MAX_REFERRERS,
    SIGNATURE_TYPE,
    Artefact,
    ReferrerFault,
    keep_artefacts,
)
from store.signatures import (
    key_id,
    make_key,
    read_key,
    sign,
    signature,
    signatures_of,
    signed_bytes,
    signer,
)
from triolet.config import FleetConfig
from triolet.errors import StoreError

from .conftest import faults, replace_readme

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ops.models.importing import Imported
    from store.layout import ModelStore

DIGEST = f"sha256:{'a' * 64}"
OTHER = f"sha256:{'b' * 64}"
ALICE = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
BOB = Ed25519PrivateKey.from_private_bytes(b"b" * 32)
STABLE = alias_of("chat", "stable")


@pytest.fixture
def digest(model: Path, add: Callable[..., Imported]) -> str:
    """A version `chat:v1`."""
    return add(model, tag="v1", may_link=True).digest


def signed(store: ModelStore, digest: str, key: Ed25519PrivateKey) -> None:
    with store.writing() as writer:
        sign(writer, digest, key)


def test_the_payload_is_signed_as_dsse_has_it() -> None:
    # Example from the specification, github.com/secure-systems-lab/dsse.
    found = signed_bytes("http://example.com/HelloWorld", b"hello world")
    assert found == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_openssl_can_check_a_signature(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: `apt-get install openssl` brings it")
    envelope = json.loads(signature(DIGEST, 10, ALICE).layer)
    payload = base64.b64decode(envelope["payload"])
    assert json.loads(payload)["subject"] == [{"digest": {"sha256": "a" * 64}}]
    (tmp_path / "signed").write_bytes(signed_bytes(envelope["payloadType"], payload))
    (tmp_path / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    public = ALICE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    command = "openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in signed -sigfile sig"
    subprocess.run(command.split(), cwd=tmp_path, check=True, timeout=60)


def test_a_signature_is_of_one_version_and_one_key() -> None:
    artefact = signature(DIGEST, 10, ALICE)
    assert artefact == signature(DIGEST, 10, ALICE)
    assert signer(artefact, DIGEST) == key_id(ALICE)
    assert signer(signature(DIGEST, 10, BOB), DIGEST) == key_id(BOB)
    with pytest.raises(ReferrerFault, match=f"its subject is {DIGEST}, another version"):
        signer(artefact, OTHER)


def changed(artefact: Artefact, **fields: Any) -> Artefact:  # noqa: ANN401 (JSON)
    """Return an artefact with another envelope and a matching manifest."""
    envelope = canonical({**json.loads(artefact.layer), **fields})
    manifest = json.loads(artefact.manifest)
    layer = {"digest": f"sha256:{hashlib.sha256(envelope).hexdigest()}", "size": len(envelope)}
    manifest["layers"][0] |= layer
    return Artefact(canonical(manifest), envelope)


def resigned(statement: object, payload_type: str = "application/vnd.in-toto+json") -> Artefact:
    """Return an artefact of DIGEST in which ALICE has signed another statement."""
    payload = canonical(statement)
    sig = base64.b64encode(ALICE.sign(signed_bytes(payload_type, payload))).decode()
    return changed(
        signature(DIGEST, 10, ALICE),
        payload=base64.b64encode(payload).decode(),
        payloadType=payload_type,
        signatures=[{"keyid": key_id(ALICE), "sig": sig}],
    )


def statement(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    payload = base64.b64decode(json.loads(signature(DIGEST, 10, ALICE).layer)["payload"])
    return {**json.loads(payload), **fields}


@pytest.mark.parametrize(
    ("artefact", "words"),
    [
        (resigned(statement(subject=[{"digest": {"sha256": "b" * 64}}])), "another version"),
        (resigned(statement(subject=[{"digest": {"sha512": "a"}}])), "signed another version"),
        (resigned(statement(subject=[])), "cannot be read"),
        (resigned(statement(predicateType="x")), "signed something else: .* x"),
        (resigned(statement(), "text/plain"), "signed something else: text/plain"),
        (resigned([]), "cannot be read"),
        (changed(signature(DIGEST, 10, ALICE), signatures=[]), "cannot be read"),
        (changed(signature(DIGEST, 10, ALICE), payload="%"), "cannot be read"),
        (changed(signature(DIGEST, 10, ALICE), payload="\N{MICRO SIGN}"), "cannot be read"),
        (Artefact(b'{"x":' * 3000, b"{}"), "manifest cannot be read"),
        (
            changed(
                signature(DIGEST, 10, ALICE), signatures=[{"keyid": key_id(BOB), "sig": "QUFB"}]
            ),
            "has not signed that",
        ),
        (
            changed(signature(DIGEST, 10, ALICE), signatures=[{"keyid": "rsa", "sig": "QUFB"}]),
            "is not Ed25519",
        ),
        (signature(DIGEST, 10, ALICE)._replace(layer=b"{}"), "does not match its manifest"),
        (Artefact(b"{", b"{}"), "manifest cannot be read"),
    ],
)
def test_what_is_no_signature_is_refused(artefact: Artefact, words: str) -> None:
    with pytest.raises(ReferrerFault, match=words):
        signer(artefact, DIGEST)


def test_one_flipped_bit_anywhere_is_seen() -> None:
    right = signature(DIGEST, 10, ALICE)
    for at in range(0, len(right.layer), 7):
        wrong = bytearray(right.layer)
        wrong[at] ^= 1
        with pytest.raises(ReferrerFault):
            signer(right._replace(layer=bytes(wrong)), DIGEST)


def test_signatures_stay_with_their_version_and_go_with_it(
    digest: str, store: ModelStore, model: Path, add: Callable[..., Imported]
) -> None:
    for key in (ALICE, BOB, ALICE):
        signed(store, digest, key)
    replace_readme(model, "another")
    other = add(model).digest
    both = tuple(sorted((key_id(ALICE), key_id(BOB))))
    assert signatures_of(store, digest) == (both, ())
    assert signatures_of(store, other) == ((), ())
    with store.writing() as writer:
        assert collect(writer).num_blobs == 0
        remove(writer, Aliases(store), parse_reference("chat:v1"))
        assert store.referrers() == ()
        # Manifest, config, README, and two files per signature.
        assert collect(writer).num_blobs == 7
    assert faults(store) == []


def test_a_damaged_signature_is_named_and_made_anew(digest: str, store: ModelStore) -> None:
    signed(store, digest, ALICE)
    (referrer,) = store.referrers(digest)
    path = store.blob_path(referrer.digest)
    path.chmod(0o644)
    path.write_bytes(b"{}")
    assert signatures_of(store, digest).keys == ()
    (fault,) = faults(store)
    assert f"signature {referrer.digest}: " in fault
    with store.writing() as writer:
        collect(writer)
    signed(store, digest, ALICE)
    assert faults(store) == []


def test_a_version_has_a_bound_of_signatures(digest: str, store: ModelStore) -> None:
    with store.writing() as writer:
        many = {
            Referrer(digest, f"sha256:{n:064x}", 1, SIGNATURE_TYPE) for n in range(MAX_REFERRERS)
        }
        writer.set_entries(store.entries(), many)
        with pytest.raises(StoreError, match=f"has {MAX_REFERRERS} artefacts .*, the most"):
            keep_artefacts(writer, digest, [(SIGNATURE_TYPE, signature(digest, 10, ALICE))])


def test_an_alias_takes_only_what_one_of_its_keys_has_signed(
    digest: str, store: ModelStore, model: Path, add: Callable[..., Imported]
) -> None:
    aliases = Aliases(store)
    aliases.require_keys(parse_reference("chat@stable"), [key_id(ALICE), key_id(BOB)])
    needed = rf"chat@stable requires a signature by .* or {key_id(ALICE)}, and chat@{digest}"
    with pytest.raises(StoreError, match=f"{needed} is not signed; nothing was changed"):
        aliases.move(STABLE, digest)
    eve = Ed25519PrivateKey.from_private_bytes(b"e" * 32)
    signed(store, digest, eve)
    with pytest.raises(StoreError, match=f"{needed} is signed by {key_id(eve)}; nothing"):
        aliases.move(STABLE, digest)
    assert STABLE not in aliases.all()
    signed(store, digest, BOB)
    aliases.move(STABLE, digest)
    replace_readme(model, "another")
    other = add(model, may_link=True).digest
    with pytest.raises(StoreError, match="is not signed"):
        aliases.move(STABLE, other)
    aliases.move(alias_of("chat", "canary"), other)
    assert aliases.all()[STABLE] == digest


def test_a_model_takes_no_tag_without_a_signature_and_is_not_served(
    digest: str, store: ModelStore, model: Path, add: Callable[..., Imported]
) -> None:
    aliases, whole = Aliases(store), parse_reference("chat")
    with pytest.raises(StoreError, match=r"chat requires a signature .*is not signed"):
        aliases.require_keys(whole, [key_id(ALICE)])
    assert aliases.required_keys(whole) == ()
    signed(store, digest, ALICE)
    aliases.require_keys(whole, [key_id(ALICE)])
    replace_readme(model, "another")
    with pytest.raises(StoreError, match=r"chat requires a signature .*is not signed"):
        add(model, tag="v2", may_link=True)
    (other,) = {one.digest for one in store.entries()} - {digest}

    def serve(named: str) -> Settings:
        return Settings(fleet=FleetConfig(model=named, store=str(store.root)))

    with (
        pytest.raises(StoreError, match="is not signed"),
        with_stored_model(serve(f"chat@{other}")),
    ):
        pytest.fail("it would be served")
    with with_stored_model(serve("chat:v1"), is_served=False):
        pass
    aliases.require_keys(whole, [])
    aliases.move(STABLE, other)


def test_a_store_of_before_there_were_requirements_is_read_and_changed(
    digest: str, store: ModelStore
) -> None:
    aliases = Aliases(store)
    with sqlite3.connect(store.root / "aliases.sqlite") as older:
        older.execute("DROP TABLE requirements")
        older.execute("PRAGMA user_version = 1")
    older.close()
    assert aliases.required_keys(parse_reference("chat")) == ()
    aliases.require_signed(parse_reference("chat"), digest)
    aliases.move(STABLE, digest)
    aliases.require_keys(parse_reference("chat:v2"), [key_id(ALICE)])
    assert aliases.required_keys(parse_reference("chat:v2")) == (key_id(ALICE),)


@pytest.mark.parametrize("scope", [f"chat@{DIGEST}", "chat@previous"])
def test_nothing_is_required_of_what_never_moves_by_itself(store: ModelStore, scope: str) -> None:
    store.root.mkdir()
    with pytest.raises(StoreError, match=r"name a tag|name stable instead"):
        Aliases(store).require_keys(parse_reference(scope), [key_id(ALICE)])


def test_a_key_is_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    make_key(path)
    assert key_id(read_key(path)).startswith("ed25519:")
    with pytest.raises(StoreError, match="File exists"):
        make_key(path)
    path.chmod(0o640)
    with pytest.raises(StoreError, match=r"has mode 0640, .*`chmod 600"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(StoreError, match="is not a private key in PEM form"):
        read_key(path)
    with pytest.raises(StoreError, match=r"`triolet model key .*` makes a key"):
        read_key(tmp_path / "missing")


def test_the_commands_say_who_has_signed(
    digest: str, store: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, key = ("--store", str(store.root)), str(tmp_path / "key.pem")
    assert main(("model", "key", key)) == 0
    ours = capsys.readouterr().out.strip()
    assert main(("model", "sign", "chat:v1", "--key", key, *where)) == 0
    assert capsys.readouterr().out.strip() == ours
    assert main(("model", "show", "chat:v1", *where)) == 0
    assert f"signed by {ours}" in capsys.readouterr().err
    assert main(("model", "verify", "chat:v1", *where)) == 0
    assert f"chat@{digest} is signed by {ours}" in capsys.readouterr().err
    assert main(("model", "require", "chat@stable", "ed25519:12", *where)) == 2
    assert main(("model", "require", "chat@stable", ours, "--none", *where)) == 2
    assert main(("model", "require", "chat@stable", ours, *where)) == 0
    capsys.readouterr()
    assert main(("model", "require", "chat@stable", *where)) == 0
    assert capsys.readouterr().out.strip() == ours
    assert main(("model", "require", "chat@stable", "--none", *where)) == 0
    assert main(("model", "require", "chat@stable", *where)) == 0
    assert "requires no signature" in capsys.readouterr().err


def test_a_damaged_version_is_not_signed(
    digest: str, store: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = next(one for one in store.manifest(digest).layers if one.file_name == "README.md")
    path = store.blob_path(readme.digest)
    path.unlink()
    path.write_bytes(b"x")
    path.chmod(0o444)
    key = str(tmp_path / "key.pem")
    assert main(("model", "key", key)) == 0
    assert main(("model", "sign", "chat:v1", "--key", key, "--store", str(store.root))) == 2
    assert "chat:v1 is not signed: README.md of chat@" in capsys.readouterr().err
    assert store.referrers() == ()
