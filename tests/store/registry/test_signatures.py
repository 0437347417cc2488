"""Tests of signatures in registries: they are pushed and pulled with their version, and a pull
refuses a version without a required one."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ops.cli import main
from store.aliases import Aliases
from store.layout import ModelStore
from store.manifest import EMPTY_DOCUMENT, MANIFEST_TYPE, canonical, digest_of
from store.measured import (
    Golden,
    GoldenPrompt,
    KeptMeasurement,
    MeasuredCapacity,
    MeasurementKey,
    as_artefact,
    golden_for,
    keep_measured,
    measured_of,
)
from store.reference import parse_reference
from store.referrers import (
    GOLDEN_TYPE,
    LAYER_TYPES,
    MAX_PART_BYTES,
    SIGNATURE_TYPE,
    artefact,
)
from store.registry.client import ATTEMPTS, Registry
from store.registry.location import parse_location
from store.registry.referrers import send_referrers
from store.signatures import key_id, sign, signature, signatures_of
from triolet.errors import RegistryFailed, StoreError

from .conftest import digest_in, pulled
from .lying_registry import Lie

if TYPE_CHECKING:
    from pathlib import Path

    from store.referrers import Artefact

    from .docker_registry import DockerRegistry
    from .lying_registry import Asked, LyingRegistry

ALICE = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
BOB = Ed25519PrivateKey.from_private_bytes(b"b" * 32)


@pytest.mark.slow
def test_signatures_of_several_come_with_the_version(
    registry: DockerRegistry, source: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    location, digest = f"oci://{registry.host}/signed/chat:v1", digest_in(source)
    stores = [ModelStore(tmp_path / name) for name in ("alice", "bob", "reader")]
    assert main(("model", "push", "chat:v1", location, "--store", str(source.root))) == 0
    for store, key in zip(stores, (ALICE, BOB), strict=False):
        pulled(store, location)
        with store.writing() as writer:
            sign(writer, digest, key)
    # Each store knows only its own: the second push must not replace the first one's list.
    pushes = [("model", "push", "chat:v1", location, "--store", str(one.root)) for one in stores]
    for push in pushes[:2]:
        assert main(push) == 0
        assert "1 signatures and measurements uploaded" in capsys.readouterr().err
        assert main(push) == 0
        assert ", 0 signatures and measurements uploaded" in capsys.readouterr().err
    found = pulled(stores[2], location)
    assert found.signers == tuple(sorted((key_id(ALICE), key_id(BOB))))
    assert signatures_of(stores[2], digest) == (found.signers, ())
    assert registry.log.count("/signed/chat/referrers/") > 1, "it has none, and was asked"


def listed(liar: LyingRegistry, *artefacts: Artefact) -> None:
    """Make the registry list signatures as in OCI 1.1, and serve them."""
    rows = [
        {
            "mediaType": MANIFEST_TYPE,
            "artifactType": SIGNATURE_TYPE,
            "digest": one.digest,
            "size": len(one.manifest),
        }
        for one in artefacts
    ]
    path = f"/referrers/{liar.digest}?artifactType={SIGNATURE_TYPE.replace('+', '%2B')}"
    liar.lie(path, Lie(200, canonical({"manifests": rows})))
    for one in artefacts:
        liar.lie(f"/manifests/{one.digest}", Lie(200, one.manifest))
        liar.lie(f"/blobs/{digest_of(one.layer)}", Lie(200, one.layer))


def signed_by(liar: LyingRegistry, key: Ed25519PrivateKey) -> Artefact:
    return signature(liar.digest, len(liar.store.read(liar.digest, 1 << 20)), key)


def test_a_registry_with_the_list_of_oci_is_asked_for_it(
    store: ModelStore, liar: LyingRegistry
) -> None:
    listed(liar, signed_by(liar, ALICE), signed_by(liar, BOB))
    assert pulled(store, liar.location).signers == tuple(sorted((key_id(ALICE), key_id(BOB))))


@pytest.mark.parametrize("num_lost", [1, ATTEMPTS])
def test_what_two_pushes_write_to_one_fallback_tag_at_the_same_moment_is_kept(
    store: ModelStore, liar: LyingRegistry, num_lost: int
) -> None:
    pulled(store, liar.location)
    with store.writing() as writer:
        sign(writer, liar.digest, ALICE)
    ours, another = signed_by(liar, ALICE), signed_by(liar, BOB)
    kept, num_puts = [b"{}"], itertools.count(1)

    def put(asked: Asked) -> Lie:
        row = {"artifactType": SIGNATURE_TYPE, "digest": another.digest}
        is_lost = next(num_puts) <= num_lost  # another push read before it and writes after it
        kept.append(canonical({"manifests": [row]}) if is_lost else asked.content)
        return Lie(201)

    tag = f"/manifests/{liar.digest.replace(':', '-')}"
    liar.lie(tag, lambda _: Lie(200, kept[-1]))
    liar.lie(tag, put, "PUT")
    liar.lie(f"/manifests/{ours.digest}", Lie(201), "PUT")
    for content in (EMPTY_DOCUMENT, ours.layer):
        liar.lie(f"/blobs/{digest_of(content)}", Lie(200, content), "HEAD")
    with closing(Registry(parse_location(liar.location), None)) as asked:
        if num_lost == ATTEMPTS:
            with pytest.raises(RegistryFailed, match=r"other pushes change its tag .* all the"):
                send_referrers(asked, store, liar.digest)
            return
        assert send_referrers(asked, store, liar.digest) == 1
    found = [row["digest"] for row in json.loads(kept[-1])["manifests"]]
    assert found == [another.digest, ours.digest]


def test_a_list_on_several_pages_is_read_to_its_end(store: ModelStore, liar: LyingRegistry) -> None:
    listed(liar, signed_by(liar, ALICE))
    first = {"link": '</v2/chat/referrers/next?n=1>; rel="next"'}
    path = next(end for _, end in liar.lies if "/referrers/" in end)
    liar.lie("/referrers/next?n=1", liar.lies["GET", path])
    liar.lie(path, Lie(200, b'{"manifests":[]}', first))
    assert pulled(store, liar.location).signers == (key_id(ALICE),)
    liar.lie("/referrers/next?n=1", Lie(200, b"<html>"))
    with pytest.raises(RegistryFailed, match=r"its list of referrers .signature. of .* cannot be"):
        pulled(store, liar.location)


@pytest.mark.slow
def test_nothing_is_fetched_or_named_without_the_signature_that_is_required(
    store: ModelStore, liar: LyingRegistry
) -> None:
    with store.writing():
        pass
    Aliases(store).require_keys(parse_reference("chat"), [key_id(ALICE)])
    with pytest.raises(StoreError, match=f"chat requires .* and chat@{liar.digest} is not signed;"):
        pulled(store, liar.location)
    listed(liar, signed_by(liar, BOB))
    with pytest.raises(StoreError, match=f"is signed by {key_id(BOB)}; nothing was changed"):
        pulled(store, liar.location)
    # ALICE's key id on BOB's signature.
    forged = signed_by(liar, BOB).layer.replace(key_id(BOB).encode(), key_id(ALICE).encode())
    manifest = json.loads(signed_by(liar, BOB).manifest)
    manifest["layers"][0] |= {"digest": digest_of(forged), "size": len(forged)}
    artefact = signed_by(liar, BOB)._replace(manifest=canonical(manifest), layer=forged)
    listed(liar, artefact)
    with pytest.raises(StoreError, match="is not signed; nothing was changed"):
        pulled(store, liar.location)
    weights = max(liar.manifest.blobs, key=lambda one: one.size).digest
    assert not any(one.path.endswith(weights) for one in liar.asked)
    assert store.entries() == ()
    listed(liar, artefact, signed_by(liar, ALICE))
    found = pulled(store, liar.location)
    assert found.signers == (key_id(ALICE),)
    assert found.notes == (
        f"signature {artefact.digest} there is not valid and is not kept: {key_id(ALICE)} has not "
        "signed that",
    )
    assert signatures_of(store, liar.digest) == ((key_id(ALICE),), ())


@pytest.mark.parametrize(
    ("part", "lie", "words"),
    [
        ("manifests", Lie(404), "it is listed but missing"),
        ("blobs", Lie(404), "its layer is missing"),
        ("blobs", Lie(200, b"{}"), "its envelope does not match its manifest"),
    ],
)
def test_a_signature_that_is_not_whole_there_is_left(
    store: ModelStore, liar: LyingRegistry, part: str, lie: Lie, words: str
) -> None:
    artefact = signed_by(liar, ALICE)
    listed(liar, artefact)
    end = artefact.digest if part == "manifests" else digest_of(artefact.layer)
    liar.lie(f"/{part}/{end}", lie)
    found = pulled(store, liar.location)
    assert found.signers == ()
    assert words in found.notes[0]


@pytest.mark.slow
def test_measurements_travel_with_the_version_and_replace_none_of_the_same_key(
    registry: DockerRegistry, source: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    location, digest = f"oci://{registry.host}/measured/chat:v1", digest_in(source)
    assert main(("model", "push", "chat:v1", location, "--store", str(source.root))) == 0
    here, there = (ModelStore(tmp_path / name) for name in ("here", "there"))
    guarded = ModelStore(tmp_path / "guarded")
    for store in (here, guarded):
        pulled(store, location)
    golden = Golden(MeasurementKey("native", "bfloat16", "a"), (GoldenPrompt((1,), (2, 3)),))
    capacity = MeasuredCapacity(
        MeasurementKey("native", "bfloat16", "a", "box"), 1.0, 1.0, 1.0, 1.0, 1.0
    )
    with here.writing() as writer:
        keep_measured(writer, digest, [golden, capacity])
    capsys.readouterr()
    push = ("model", "push", "chat:v1", location, "--store", str(here.root))
    for num_sent in (2, 0):
        assert main(push) == 0
        assert f", {num_sent} signatures and measurements uploaded" in capsys.readouterr().err
    assert pulled(there, location).notes == ()
    assert golden_for(there.root, digest, golden.key) is not None
    assert pulled(there, location).notes == (), "they are the same"
    Aliases(guarded).require_keys(parse_reference("chat@stable"), [key_id(ALICE)])
    (note,) = pulled(guarded, location).notes
    assert note.startswith("golden tokens there are not kept: chat requires signatures here")
    assert golden_for(guarded.root, digest, golden.key) is None
    own = Golden(golden.key, (GoldenPrompt((1,), (2, 4)),))
    with there.writing() as writer:
        keep_measured(writer, digest, [own])
    (note,) = pulled(there, location).notes
    assert f"there differ from those here for {golden.key} (" in note
    (kept,) = measured_of(there, digest, GOLDEN_TYPE)
    assert isinstance(kept, KeptMeasurement)
    assert kept.said == own


def lists_golden(liar: LyingRegistry, one: Artefact, size: int) -> None:
    """Make the registry list golden tokens with a given manifest size, and serve them."""
    rows = [{"artifactType": GOLDEN_TYPE, "digest": one.digest, "size": size}]
    path = f"/referrers/{liar.digest}?artifactType="
    for kind in LAYER_TYPES:
        answer = canonical({"manifests": rows if kind == GOLDEN_TYPE else []})
        liar.lie(path + kind.replace("+", "%2B"), Lie(200, answer))
    liar.lie(f"/manifests/{one.digest}", Lie(200, one.manifest))
    liar.lie(f"/blobs/{digest_of(one.layer)}", Lie(200, one.layer))


def test_measurements_that_lie_are_left(store: ModelStore, liar: LyingRegistry) -> None:
    wrong = artefact(GOLDEN_TYPE, b'{"key":1}', liar.digest, 10)
    lists_golden(liar, wrong, len(wrong.manifest))
    (note,) = pulled(store, liar.location).notes
    assert note.startswith(f"golden tokens {wrong.digest} there is not valid and is not kept: ")
    assert store.referrers() == ()


@pytest.mark.parametrize("part", ["manifest", "layer"])
def test_measurements_that_the_store_could_not_read_again_are_left(
    store: ModelStore, liar: LyingRegistry, part: str
) -> None:
    # Otherwise they would be damaged here, and no worker of the version would start.
    said = Golden(MeasurementKey("native", "bfloat16", "a"), (GoldenPrompt((1,), (2, 3)),))
    _, right = as_artefact(said, liar.digest, 10)
    manifest, layer = json.loads(right.manifest), right.layer
    if part == "manifest":
        manifest["annotations"] = {"x": "x" * MAX_PART_BYTES}
    else:
        layer += b" " * MAX_PART_BYTES
        manifest["layers"][0]["digest"] = digest_of(layer)
    wrong = right._replace(manifest=canonical(manifest), layer=layer)
    lists_golden(liar, wrong, len(right.manifest))
    (note,) = pulled(store, liar.location).notes
    assert re.search(rf"its {part} has \d+ bytes", note)
    assert store.referrers() == ()
    assert golden_for(store.root, liar.digest, said.key) is None
