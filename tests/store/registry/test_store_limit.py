"""Tests of a model store with a size limit: evicted versions can be pulled again, and versions that
are needed or exist only here stay."""

from __future__ import annotations

import json
import os
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ops.cli import main
from ops.models.importing import WantedImport, import_model
from ops.models.stored import with_stored_model
from ops.settings.form import Settings
from store.aliases import Aliases
from store.evict import Stays, make_room, size_of
from store.layout import ModelStore
from store.partial import Partials
from store.reference import parse_reference, tag_of
from store.registry.client import Registry
from store.registry.copies import Copies
from store.registry.location import parse_location
from store.registry.pull import WantedVersion, pull
from store.signatures import key_id, sign, signatures_of
from store.sources import Source, Sources
from store.verify import verify
from store.view import opened
from tests.gguf_files import write_tiny
from triolet.config import FleetConfig, WeightFormat
from triolet.errors import StoreError

from .conftest import pulled
from .lying_registry import Lie

if TYPE_CHECKING:
    from pathlib import Path

    from .docker_registry import DockerRegistry
    from .lying_registry import LyingRegistry

NAMES = ("a", "b", "c")


@pytest.fixture(scope="session")
def repository(registry: DockerRegistry, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A repository with three versions of about 360 KB, `a` to `c`, that share no weights."""
    folder = tmp_path_factory.mktemp("three")
    store = ModelStore(folder / "store")
    file = write_tiny(folder / "tiny.gguf")
    place = f"oci://{registry.host}/limit"
    for number, name in enumerate(NAMES):
        with file.open("ab") as end:
            end.write(bytes([number]))
        import_model(store, WantedImport(str(file), name, "v1", None, WeightFormat.DTYPE, False))
        command = ("model", "push", f"{name}:v1", f"{place}/{name}:v1", "--store", str(store.root))
        assert main(command) == 0
    return place


@pytest.fixture
def full(repository: str, store: ModelStore) -> ModelStore:
    """A store with all three, used in this order."""
    for second, name in enumerate(NAMES):
        got = fetched(store, repository, name)
        (path,) = Sources(store).folder.glob(f"{got.removeprefix('sha256:')}-*")
        os.utime(path, (second, second))
    return store


def fetched(store: ModelStore, repository: str, name: str, limit: int | None = None) -> str:
    wanted = WantedVersion(name, tag_of(name, "v1"), limit)
    place = parse_location(f"{repository}/{name}:v1")
    with closing(Registry(place, None)) as asked:
        return pull(store, asked, wanted, lambda done, total: None).digest


def names(store: ModelStore) -> list[str]:
    return [entry.name for entry in store.entries()]


def room(store: ModelStore, most_bytes: int) -> dict[Stays, int]:
    """Evict, and return the number of versions that stay by reason."""
    with store.writing() as writer:
        return dict(make_room(writer, Aliases(store), most_bytes, Copies(store).has).stays)


@pytest.mark.slow
def test_the_longest_unused_goes_and_comes_back(
    full: ModelStore, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = Aliases(full).resolve(parse_reference("a:v1"))
    where = ("--store", str(full.root))
    limit = str(size_of(full) - 1)
    assert main(("model", "gc", "--store-limit", limit, *where)) == 0
    err = capsys.readouterr().err
    command = f"triolet model pull {repository}/a@{digest} --name a --tag v1"
    assert f"a@{digest} is evicted; `{command}` restores it" in err
    assert names(full) == ["b", "c"]
    assert size_of(full) < int(limit) - 300_000
    assert verify(full, full.entries()).faults == []
    for reference in ("a", "a:v1", f"a@{digest}"):
        with pytest.raises(StoreError, match=f"{reference} was evicted .*`{command}` brings"):
            Aliases(full).resolve(parse_reference(reference))
    assert main(("model", "list", "--json", *where)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[-1] == {"name": "a", "digest": digest, "evicted_to": f"{repository}/a@{digest}"}
    assert main((*command.split()[1:], *where)) == 0
    assert Aliases(full).resolve(parse_reference("a:v1")) == digest
    assert Sources(full).evicted() == []


def test_the_limit_may_be_a_setting_and_an_option_counts_before_it(
    full: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "triolet.toml"
    file.write_text(
        f'[fleet]\nstore = "{full.root}"\n[server]\nport = 8001\n[store]\nlimit_bytes = "1GiB"\n'
    )
    from_file = ("model", "gc", "--config", str(file))
    assert main(from_file) == 0
    assert names(full) == ["a", "b", "c"]
    size = size_of(full)
    assert main((*from_file, "--set", f"store.limit_bytes={size - 1}")) == 0
    assert names(full) == ["b", "c"]
    limit = str(size_of(full) - 1)
    assert main((*from_file, "--store-limit", limit)) == 0
    assert names(full) == ["c"]
    for command, refused in (
        ((*from_file, "--set", "server.port=1"), "`triolet model gc` does not read this field"),
        (("serve", "demo", "--set", "store.limit_bytes=1GiB"), "`triolet serve` does not read"),
        ((*from_file, "--set", "store.limit_bytes=0"), "limit_bytes is 0; allowed: >= 1"),
    ):
        capsys.readouterr()
        assert main(command) == 2
        assert refused in capsys.readouterr().err


def test_gc_removes_packed_weights_also_where_there_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    file = tmp_path / "cache" / "triolet" / "packed" / f"{'0123' * 8}.packed"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(2048))
    assert main(("model", "gc", "--store", str(tmp_path / "else"))) == 2
    assert file.exists(), "another store was named"
    capsys.readouterr()
    assert main(("model", "gc")) == 0
    assert capsys.readouterr().err == "packed weights: 1 removed, 2 KiB; 0 kept (in use)\n"
    assert not file.exists()
    file.write_bytes(bytes(2048))
    elsewhere = f"decode.engine.snapshots.folder={tmp_path / 'elsewhere'}"
    assert main(("model", "gc", "--set", elsewhere)) == 0
    assert not file.exists(), "the other workers have theirs there"


def test_a_pull_keeps_to_the_limit_of_the_settings(
    full: ModelStore, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--set", f"fleet.store={full.root}", "--set", "store.limit_bytes=1KiB")
    assert main(("model", "pull", f"{repository}/c:v1", "--tag", "again", *settings)) == 2
    assert "bytes more than its limit" in capsys.readouterr().err


class Killed(Exception):
    """Stands for a kill."""


def test_a_tag_of_which_the_version_is_gone_says_so_and_is_mended(
    full: ModelStore, repository: str
) -> None:
    aliases, tag = Aliases(full), tag_of("a", "v1")
    digest = aliases.resolve(parse_reference("a:v1"))
    with (
        suppress(Killed),
        full.writing() as writer,
        aliases.unnamed("a", digest, but_for=tag),
    ):
        writer.set_entries([one for one in full.entries() if one.name != "a"])
        raise Killed
    with pytest.raises(StoreError, match=r"a:v1 was evicted .*`triolet model pull .* brings"):
        aliases.resolve(parse_reference("a:v1"))
    assert tag not in aliases.all()
    assert [(move.old, move.new) for move in aliases.moves(tag)] == [("", digest)]
    # Another version takes the name: nothing prevents it.
    other = fetched(full, repository, "b")
    with full.writing() as writer:
        (entry,) = (one for one in full.entries() if one.name == "b")
        writer.set_entries({*full.entries(), entry._replace(name="a")})
    aliases.tag_new(tag, other, "pulled")
    assert aliases.resolve(parse_reference("a:v1")) == other
    assert [(move.old, move.new) for move in aliases.moves(tag)] == [
        ("", other),
        (digest, ""),
        ("", digest),
    ]


def test_serving_counts_as_use(full: ModelStore) -> None:
    settings = Settings(fleet=FleetConfig(model="a:v1", store=str(full.root)))
    with with_stored_model(settings):
        pass
    assert room(full, size_of(full) - 1) == {}
    assert names(full) == ["a", "c"]


@pytest.mark.slow
def test_a_pull_makes_its_room_first(
    full: ModelStore, repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = size_of(full)
    with full.writing() as writer:
        make_room(writer, Aliases(full), limit - 1, Copies(full).has)
    assert names(full) == ["b", "c"]
    fetched(full, repository, "a", limit)
    assert names(full) == ["a", "b", "c"], "nothing goes that need not"
    small = limit - 1
    fetched(full, repository, "b", small)
    assert names(full) == ["a", "b"], "what is pulled stays, and is the last that was used"
    command = ("model", "pull", f"{repository}/c:v1", "--store-limit", str(small))
    assert main((*command, "--store", str(full.root))) == 0
    assert names(full) == ["b", "c"]
    assert f" is evicted; `triolet model pull {repository}/a@" in capsys.readouterr().err
    assert size_of(full) <= small


def test_a_pull_and_what_it_evicts_are_recorded(
    full: ModelStore, repository: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = {name: Aliases(full).resolve(parse_reference(name)) for name in NAMES}
    limit = str(size_of(full) - 1)
    where = ("--store", str(full.root), "--audit", str(tmp_path / "log"))
    assert main(("model", "gc", "--store-limit", limit, *where)) == 0
    command = ("model", "pull", f"{repository}/a:v1", "--tag", "again", "--store-limit", limit)
    assert main((*command, *where)) == 0
    capsys.readouterr()
    assert main(("audit", "export", "--audit", str(tmp_path / "log"))) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    subjects = [(one["action"], one["subject"]) for one in entries if one["outcome"] == "done"]
    assert subjects == [
        ("log.begin", ""),
        ("model.rm", f"a@{digest['a']}"),
        ("model.gc", str(full.root)),
        ("model.rm", f"b@{digest['b']}"),
        ("model.pull", f"{repository}/a:v1 as a:again"),
    ]


def test_what_is_named_served_or_only_here_stays(
    full: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aliases = Aliases(full)
    digests = [aliases.resolve(parse_reference(name)) for name in NAMES]
    aliases.move(parse_reference("a@stable").pointer or pytest.fail("an alias"), digests[0])
    aliases.move(tag_of("b", "keep"), digests[1])
    file = write_tiny(tmp_path / "own.gguf")
    import_model(full, WantedImport(str(file), "own", None, None, WeightFormat.DTYPE, False))
    with opened(full, digests[2]):
        stays = room(full, 0)
    assert stays == {Stays.NAMED: 2, Stays.SERVED: 1, Stays.ONLY_HERE: 1}
    assert names(full) == ["a", "b", "c", "own"]
    assert main(("model", "gc", "--store-limit", "1KiB", "--store", str(full.root))) == 1
    assert names(full) == ["a", "b", "own"]
    err = capsys.readouterr().err
    assert "more than the limit of 1 KiB, and nothing else can be evicted: " in err
    assert "1 in no known registry" in err
    assert "2 named by an alias or by another tag than it was pulled with" in err


def test_a_version_of_two_names_goes_under_both_or_none(full: ModelStore, repository: str) -> None:
    place = parse_location(f"{repository}/a:v1")
    with closing(Registry(place, None)) as asked:
        pull(full, asked, WantedVersion("z", None), lambda done, total: None)
    digest = Aliases(full).resolve(parse_reference("z"))
    Aliases(full).move(tag_of("z", "keep"), digest)
    assert room(full, 0) == {Stays.NAMED: 1}
    assert names(full) == ["a", "z"]
    Aliases(full).remove(tag_of("z", "keep"))
    assert room(full, 0) == {}
    assert names(full) == []


def test_what_its_registry_has_lost_stays(full: ModelStore, repository: str) -> None:
    found = {one.name: one for one, _ in Sources(full).all()}
    elsewhere = found["a"].location.replace("/limit/a@", "/limit/gone@")
    for name, location in (("a", elsewhere), ("b", "oci://127.0.0.1:1/b@" + found["b"].digest)):
        one = found[name]
        Sources(full).note(Source(name, one.digest, location, "v1"))
    assert room(full, 0) == {Stays.NOT_THERE: 2}
    assert names(full) == ["a", "b"]


def test_what_its_registry_has_in_part_stays(store: ModelStore, liar: LyingRegistry) -> None:
    digest = pulled(store, liar.location).digest
    content = store.read(digest, 1 << 20)
    weights = max(liar.manifest.blobs, key=lambda one: one.size).digest
    for method in ("HEAD", "GET"):
        liar.lie(f"manifests/{digest}", Lie(200, content), method)
    for lie in (("GET", f"manifests/{digest}", b"<html>"), ("HEAD", weights, b"")):
        method, path, said = lie
        told = liar.lies.get((method, path))
        liar.lie(path, Lie(200 if said else 404, said), method)
        assert room(store, 0) == {Stays.NOT_THERE: 1}
        liar.lies[method, path] = told or Lie(200, liar.store.blob_path(weights).read_bytes())
    assert room(store, 0) == {}
    assert store.entries() == ()


def test_a_version_with_a_signature_that_is_only_here_stays(
    full: ModelStore, repository: str
) -> None:
    digest = Aliases(full).resolve(parse_reference("a:v1"))
    key = Ed25519PrivateKey.generate()
    with full.writing() as writer:
        sign(writer, digest, key)
    assert room(full, 0) == {Stays.NOT_THERE: 1}
    assert names(full) == ["a"]
    command = ("model", "push", "a:v1", f"{repository}/a:v1", "--store", str(full.root))
    assert main(command) == 0
    assert room(full, 0) == {}
    assert fetched(full, repository, "a") == digest
    assert signatures_of(full, digest).keys == (key_id(key),)


def test_a_pull_that_no_room_can_be_made_for_evicts_nothing(
    full: ModelStore, repository: str
) -> None:
    aliases = Aliases(full)
    with full.writing() as writer:
        make_room(writer, aliases, size_of(full) - 1, Copies(full).has)
    aliases.move(tag_of("b", "keep"), aliases.resolve(parse_reference("b")))
    with pytest.raises(
        StoreError, match=r"more than its limit, .*: 1 named by .*nothing was evict"
    ):
        fetched(full, repository, "a", 500_000)
    assert names(full) == ["b", "c"]
    assert list(Partials(full).folder.glob("*.part")) == []


def test_what_is_removed_is_not_called_evicted(full: ModelStore) -> None:
    assert main(("model", "rm", "a:v1", "--store", str(full.root))) == 0
    assert Sources(full).evicted() == []
    with pytest.raises(StoreError, match="has no a; it has b, c"):
        Aliases(full).resolve(parse_reference("a"))


def test_a_torn_source_keeps_its_version(full: ModelStore) -> None:
    path = next(Sources(full).folder.glob("*-a.json"))
    path.write_bytes(path.read_bytes()[:-5])
    assert room(full, 0) == {Stays.ONLY_HERE: 1}
    assert names(full) == ["a"]
