"""Tests of registries that lie, refuse or misbehave: each case has its error, and wrong data is
never kept."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from typing import TYPE_CHECKING

import httpx2
import pytest

from ops.models.importing import WantedImport, import_model
from ops.models.stored import with_stored_model
from ops.settings.form import Settings
from store.layout import BLOB_MODE
from store.manifest import ENGINE_TYPE, SAMPLING_TYPE, canonical, digest_of
from store.partial import Partials
from store.reference import parse_reference
from store.registry.client import ATTEMPTS, Interrupted, Registry
from store.registry.credentials import Credentials
from store.registry.location import parse_location
from store.registry.pull import WantedVersion, pull
from store.registry.push import push
from tests.gguf_files import write_tiny
from triolet.config import FleetConfig, WeightFormat
from triolet.errors import RegistryFailed, StoreError

from .conftest import digest_in, pulled
from .lying_registry import Lie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from store.layout import ModelStore

    from .lying_registry import Asked, LyingRegistry

CHAT = parse_reference("chat:v1")
SECRET = "very secret"


@pytest.fixture
def weights(liar: LyingRegistry) -> str:
    """End of the path of the largest blob."""
    return max(liar.manifest.blobs, key=lambda one: one.size).digest


def content_of(liar: LyingRegistry, digest: str) -> bytes:
    return liar.store.blob_path(digest).read_bytes()


def refused(store: ModelStore, liar: LyingRegistry, words: str) -> None:
    with pytest.raises((RegistryFailed, StoreError), match=words):
        pulled(store, liar.location)
    assert store.entries() == ()
    assert not any(store.blobs.glob("*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda blob: bytes([blob[0] ^ 1]) + blob[1:], "has the digest sha256:"),
        (lambda blob: blob + b"x", "is longer"),
    ],
)
def test_bytes_with_another_digest_are_not_kept(
    store: ModelStore,
    liar: LyingRegistry,
    weights: str,
    change: Callable[[bytes], bytes],
    words: str,
) -> None:
    liar.lie(weights, Lie(200, change(content_of(liar, weights))))
    refused(store, liar, f"model.gguf .*{words}.*, expected {weights} .*it was rejected")
    assert Partials(store).size(weights) == 0


def test_a_blob_that_always_ends_early_is_asked_for_a_few_times(
    store: ModelStore, liar: LyingRegistry, weights: str
) -> None:
    whole = content_of(liar, weights)
    liar.lie(weights, Lie(200, whole[:-1], {"content-length": str(len(whole))}))
    refused(store, liar, "lost or not made.* bytes of model.gguf .* are kept")
    assert len([one for one in liar.asked if one.path.endswith(weights)]) == ATTEMPTS


def test_what_a_pull_has_left_may_be_wrong_and_is_fetched_anew(
    store: ModelStore, liar: LyingRegistry, weights: str
) -> None:
    partials = Partials(store)
    with partials.kept(), partials.opened(weights) as file:
        file.write(b"x" * 1000)
    assert pulled(store, liar.location).digest == digest_in(liar.store)
    ranges = [one.headers.get("range") for one in liar.asked if one.path.endswith(weights)]
    assert ranges == ["bytes=1000-", None]


@pytest.mark.parametrize("status", [200, 206])
def test_a_registry_that_knows_no_ranges_sends_all_again(
    store: ModelStore, liar: LyingRegistry, weights: str, status: int
) -> None:
    whole = content_of(liar, weights)
    partials = Partials(store)
    with partials.kept(), partials.opened(weights) as file:
        file.write(whole[:1000])
    said = {"content-range": f"bytes 0-{len(whole) - 1}/{len(whole)}"} if status == 206 else {}
    liar.lie(weights, Lie(status, whole, said))
    if status == 206:
        refused(store, liar, "is the range .* where bytes 1000- were asked for")
    else:
        assert pulled(store, liar.location).digest == digest_in(liar.store)


def test_a_manifest_with_another_digest_is_refused(store: ModelStore, liar: LyingRegistry) -> None:
    right = f"oci://{liar.host}/chat@{liar.digest}"
    liar.lie(f"manifests/{liar.digest}", Lie(200, b"{}"))
    with pytest.raises(RegistryFailed, match=f"has the digest .*, expected {liar.digest}"):
        pulled(store, right)
    liar.lie("manifests/v1", Lie(200, b"{}", {"docker-content-digest": liar.digest}))
    refused(store, liar, f"has the digest .*, expected {liar.digest}")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"schemaVersion": 2, "manifests": []}, "is an index of several manifests"),
        ({"schemaVersion": 2}, "cannot be read: .*push a version there with"),
        ([], "cannot be read"),
    ],
)
def test_what_is_no_model_is_refused(
    store: ModelStore, liar: LyingRegistry, document: object, words: str
) -> None:
    liar.lie("manifests/v1", Lie(200, canonical(document)))
    refused(store, liar, words)


def test_a_model_of_another_program_is_refused_before_it_is_fetched(
    store: ModelStore, liar: LyingRegistry
) -> None:
    document = json.loads(liar.store.read(liar.digest, 1 << 20))
    document["layers"] = [one for one in document["layers"] if "triolet" not in one["mediaType"]]
    liar.lie("manifests/v1", Lie(200, canonical(document)))
    refused(store, liar, "without a layer application/vnd.triolet.engine.* another program")
    document["layers"][0]["annotations"]["org.cncf.model.filepath"] = "../../x"
    liar.lie("manifests/v1", Lie(200, canonical(document)))
    refused(store, liar, "names the file '../../x', expected a plain file name")
    assert all("/blobs/" not in one.path for one in liar.asked)


def test_a_body_that_trickles_is_given_up(
    store: ModelStore, liar: LyingRegistry, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Instead of a registry slower than 16 KiB/s: one slower than 1 EiB/s.
    monkeypatch.setattr("store.registry.client.SILENCE_S", 0.0)
    monkeypatch.setattr("store.registry.client.SLOWEST_BYTES_S", 1 << 60)
    refused(store, liar, "manifest v1 is slower than .*; try again when the network is better")
    assert len(liar.asked) == ATTEMPTS


def test_a_body_that_trickles_is_not_waited_for(
    liar: LyingRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.registry.client.SILENCE_S", 0.0)
    monkeypatch.setattr("store.registry.client.SLOWEST_BYTES_S", 1 << 60)
    sent = []

    def trickle() -> Iterator[bytes]:
        for _ in range(100):
            sent.append(b"x")
            yield sent[-1]

    with closing(Registry(parse_location(liar.location), None)) as asked:
        pieces = asked.pieces(httpx2.Response(200, content=trickle()), "manifest v1")
        with pytest.raises(Interrupted, match="manifest v1 is slower than"):
            next(pieces)
    assert len(sent) == 1


@pytest.mark.parametrize("path", ["manifests/v1", "/token"])
def test_headers_that_trickle_are_given_up(
    liar: LyingRegistry, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("store.registry.client.SILENCE_S", 0.2)
    realm = f'Bearer realm="http://{liar.host}/token"'
    liar.lie("manifests/v1", Lie(401, b"", {"www-authenticate": realm}))
    # Complete after four seconds, each byte well within the 0.2 s.
    liar.lie(path, Lie(200, b'{"token":"x"}', {"x-padding": "x" * 2000}, trickles=True))
    with (
        closing(Registry(parse_location(liar.location), None)) as asked,
        pytest.raises(Interrupted, match="manifest v1 was lost or not made: timed out; check"),
        asked.streaming("GET", "manifests/v1", "manifest v1", {200}, silence_s=0.2),
    ):
        pytest.fail("all headers have come")


def test_headers_that_trickle_on_a_connection_that_is_used_again_are_given_up(
    liar: LyingRegistry,
) -> None:
    liar.lie("manifests/v2", Lie(200, b"", {"x-padding": "x" * 2000}, trickles=True))
    with closing(Registry(parse_location(liar.location), None)) as asked:
        asked.call("GET", "manifests/v1", "manifest v1", {200})
        with (
            pytest.raises(Interrupted, match="manifest v2 was lost or not made: timed out; check"),
            asked.streaming("GET", "manifests/v2", "manifest v2", {200}, silence_s=0.2),
        ):
            pytest.fail("all headers have come")


def test_a_manifest_without_end_is_not_read(store: ModelStore, liar: LyingRegistry) -> None:
    liar.lie("manifests/v1", Lie(200, b" " * (5 << 20)))
    refused(store, liar, "has more than 4194304 bytes and was rejected")


def test_what_an_import_brings_meanwhile_is_not_fetched_and_leaves_nothing(
    store: ModelStore,
    liar: LyingRegistry,
    weights: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("store.registry.blobs.MAX_TRANSFERS", 1)
    file = write_tiny(tmp_path / "tiny.gguf")

    def meanwhile(_: Asked) -> None:
        import_model(store, WantedImport(str(file), "chat", "v1", None, WeightFormat.DTYPE, False))

    liar.lie(weights, meanwhile)
    assert pulled(store, liar.location).digest == digest_in(liar.store) == digest_in(store)
    assert [one.path for one in liar.asked if "/blobs/" in one.path] == [
        f"/v2/chat/blobs/{weights}"
    ]
    assert list(Partials(store).folder.glob("*.part")) == []


def test_what_was_fetched_and_then_overwritten_with_as_many_bytes_is_fetched_again(
    store: ModelStore, liar: LyingRegistry, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One at a time, largest first: it is complete when the next one is requested.
    monkeypatch.setattr("store.registry.blobs.MAX_TRANSFERS", 1)
    after = sorted(liar.manifest.blobs, key=lambda one: -one.size)[1].digest
    path = Partials(store).path(weights)

    def overwrite(_: Asked) -> None:
        path.write_bytes(bytes(path.stat().st_size))

    liar.lie(after, overwrite)
    pulled(store, liar.location)
    assert store.blob_path(weights).read_bytes() == content_of(liar, weights)


def test_a_pull_that_ends_before_its_blobs_have_their_names_leaves_them_writable(
    store: ModelStore, liar: LyingRegistry, weights: str
) -> None:
    # Blocks the rename, as a kill just before it would.
    in_the_way = store.blob_path(weights)
    in_the_way.mkdir(parents=True)
    with pytest.raises(StoreError, match="Is a directory"):
        pulled(store, liar.location)
    left = Partials(store).path(weights).stat()
    assert left.st_mode & stat.S_IWUSR
    assert left.st_size == len(content_of(liar, weights))
    in_the_way.rmdir()
    asked = len(liar.asked)
    pulled(store, liar.location)
    assert not [one for one in liar.asked[asked:] if one.path.endswith(weights)]
    assert stat.S_IMODE(store.blob_path(weights).stat().st_mode) == BLOB_MODE


NESTED = b'{"x":' * 100_000
"""No parser reads this to its end."""


@pytest.mark.parametrize(
    ("path", "lie", "words"),
    [
        ("manifests/v1", Lie(200, NESTED), "cannot be read: maximum recursion depth"),
        ("%2Bjson", Lie(200, NESTED), "its list of referrers .signature. of .* cannot be read"),
        ("manifests/v1", Lie(404, NESTED), "status 404; check host"),
    ],
)
def test_a_document_that_no_parser_reads_is_named(
    store: ModelStore, liar: LyingRegistry, path: str, lie: Lie, words: str
) -> None:
    liar.lie(path, lie)
    refused(store, liar, words)


@pytest.mark.parametrize("media_type", [SAMPLING_TYPE, ENGINE_TYPE])
def test_a_version_with_settings_that_cannot_be_read_is_named_and_not_served(
    store: ModelStore, liar: LyingRegistry, media_type: str
) -> None:
    document = json.loads(liar.store.read(liar.digest, 1 << 20))
    others = [one for one in document["layers"] if one["mediaType"] != media_type]
    nested = {"mediaType": media_type, "digest": digest_of(NESTED), "size": len(NESTED)}
    liar.lie("manifests/v1", Lie(200, canonical({**document, "layers": [*others, nested]})))
    liar.lie(digest_of(NESTED), Lie(200, NESTED))
    pulled(store, liar.location)
    settings = Settings(fleet=FleetConfig(model="chat:v1", store=str(store.root)))
    with (
        pytest.raises(
            StoreError, match=r"chat@sha256:.* has (settings unknown|invalid sampling defaults)"
        ),
        with_stored_model(settings),
    ):
        pytest.fail("it is served")


@pytest.mark.parametrize("token", ["\N{MICRO SIGN}", "a\nb", "[" * 100_000])
def test_what_no_header_can_hold_is_no_token(
    store: ModelStore, liar: LyingRegistry, token: str
) -> None:
    realm = f'Bearer realm="http://{liar.host}/token"'
    liar.lie("manifests/v1", Lie(401, b"", {"www-authenticate": realm}))
    said = token if token.startswith("[") else json.dumps({"token": token})
    liar.lie("/token", Lie(200, said.encode()))
    refused(store, liar, "answers the login with no token")


def test_a_range_of_endless_digits_is_a_lie(
    store: ModelStore, liar: LyingRegistry, weights: str
) -> None:
    partials = Partials(store)
    with partials.kept(), partials.opened(weights) as file:
        file.write(b"x")
    said = {"content-range": f"bytes {'1' * 5000}-2/3"}
    liar.lie(weights, Lie(206, b"y", said))
    refused(store, liar, "is the range .* where bytes 1- were asked for")


def test_a_model_that_the_disk_has_no_room_for_is_not_begun(
    store: ModelStore, liar: LyingRegistry
) -> None:
    document = json.loads(liar.store.read(liar.digest, 1 << 20))
    document["layers"][0] |= {"size": 1 << 60, "digest": f"sha256:{'0' * 64}"}
    liar.lie("manifests/v1", Lie(200, canonical(document)))
    refused(store, liar, "the version needs 1048576 TiB more; make room")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "no credentials were given: set TRIOLET_REGISTRY_USERNAME"),
        (403, r"DENIED: not you\); no credentials were given"),
        (404, "check host, repository and tag"),
        (413, "refuses a body of this size: raise its limit"),
        (418, "refuses that"),
        (503, "the registry is busy or broken: repeat the command"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(
    store: ModelStore, liar: LyingRegistry, status: int, words: str
) -> None:
    said = b'{"errors":[{"code":"DENIED","message":"not\\nyou"}]}'
    liar.lie("manifests/v1", Lie(status, said))
    refused(store, liar, f"manifest v1 is refused with status {status} .*{words}")
    assert len(liar.asked) == (ATTEMPTS if status == 503 else 1)


def test_a_busy_registry_is_asked_again_when_it_says(
    store: ModelStore, liar: LyingRegistry
) -> None:
    liar.lie(
        "manifests/v1",
        lambda _: Lie(429, b"", {"retry-after": "0"}) if len(liar.asked) < 3 else None,
    )
    assert pulled(store, liar.location).digest == digest_in(liar.store)
    liar.lie("manifests/v1", Lie(429, b"", {"retry-after": "3600"}))
    with pytest.raises(RegistryFailed, match="later, it goes on from there, in 3600 s as it asks"):
        pulled(store, liar.location)


def test_what_is_asked_beyond_this_machine_without_tls_is_refused(
    store: ModelStore, liar: LyingRegistry, weights: str
) -> None:
    liar.lie(weights, Lie(307, b"", {"location": "http://registry.example/x"}))
    refused(store, liar, "leads to http://registry.example without TLS")
    liar.lie(weights, lambda _: Lie(307, b"", {"location": liar.asked[-1].path}))
    refused(store, liar, "is redirected endlessly")


def test_no_password_goes_elsewhere_or_into_an_error(
    store: ModelStore, liar: LyingRegistry, weights: str
) -> None:
    def told(asked: Asked) -> Lie | None:
        if "authorization" not in asked.headers:
            return Lie(401, b"", {"www-authenticate": 'Basic realm="x"'})
        if asked.path.endswith(weights):
            # The same server under another name counts as another place for credentials.
            return Lie(307, b"", {"location": f"http://localhost:{liar.server_port}/elsewhere"})
        return None

    said = f'{{"errors":[{{"code":"X","message":"{SECRET} is no good"}}]}}'
    liar.lie("", told)
    liar.lies = {("GET", "/elsewhere"): Lie(403, said.encode()), **liar.lies}
    place = parse_location(liar.location)
    asked = Registry(place, Credentials("alice", SECRET, "a test"))
    with closing(asked), pytest.raises(RegistryFailed) as failed:
        pull(store, asked, WantedVersion("chat", None), lambda done, total: None)
    assert SECRET not in str(failed.value)
    assert "(X: *** is no good); asked as alice with the password from a test" in str(failed.value)
    (elsewhere,) = {one.headers.get("authorization") for one in liar.asked if "else" in one.path}
    assert elsewhere is None


def test_a_registry_that_changes_manifests_is_refused(
    source: ModelStore, liar: LyingRegistry
) -> None:
    other = f"sha256:{'0' * 64}"
    liar.lie("manifests/v2", Lie(201, b"", {"docker-content-digest": other}), "PUT")
    with (
        closing(Registry(parse_location(liar.location.replace("v1", "v2")), None)) as asked,
        pytest.raises(RegistryFailed, match=f"has kept manifest v2 as {other}, expected"),
    ):
        push(
            source,
            asked,
            parse_reference("chat:v1"),
            digest_in(source),
            None,
            lambda done, total: None,
        )


def test_a_damaged_blob_is_not_sent(store: ModelStore, liar: LyingRegistry, weights: str) -> None:
    digest = pulled(store, liar.location).digest
    path = store.blob_path(weights)
    path.chmod(0o644)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with (
        closing(Registry(parse_location(liar.location), None)) as asked,
        pytest.raises(StoreError, match=r"model\.gguf of .* is damaged"),
    ):
        push(store, asked, CHAT, digest, None, lambda done, total: None)
    assert {one.method for one in liar.asked} == {"GET"}
