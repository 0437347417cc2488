"""Tests of tags and aliases in the model store: resolving them, moving them, and protecting
versions from removal."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from ops.cli import main
from store.aliases import ABSENT, Aliases
from store.collect import collect, remove
from store.reference import alias_of, parse_reference, tag_of
from store.view import opened
from tests import forked
from triolet.errors import StoreError

from .conftest import faults, replace_readme

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ops.models.importing import Imported
    from store.layout import ModelStore

STABLE = alias_of("chat", "stable")
TIMEOUT_S = 60.0


@pytest.fixture
def versions(model: Path, add: Callable[..., Imported]) -> list[str]:
    """Three versions of one model, tagged v0 to v2."""
    found = []
    for number in range(3):
        replace_readme(model, f"version {number}")
        found.append(add(model, tag=f"v{number}", may_link=True).digest)
    return found


@pytest.fixture
def aliases(store: ModelStore) -> Aliases:
    """The aliases of the store."""
    return Aliases(store)


def test_a_name_means_stable_or_the_only_version(
    versions: list[str], aliases: Aliases, store: ModelStore
) -> None:
    with pytest.raises(StoreError, match="has 3 versions and no alias stable: name one"):
        aliases.resolve(parse_reference("chat"))
    aliases.move(STABLE, versions[1])
    assert aliases.resolve(parse_reference("chat")) == versions[1]
    assert aliases.resolve(parse_reference("chat:v2")) == versions[2]
    assert aliases.resolve(parse_reference(f"chat@{versions[0]}")) == versions[0]
    for missing in ("chat:v9", "chat@canary", f"chat@sha256:{'0' * 64}", "other"):
        with pytest.raises(StoreError, match=f"has no {missing}; it has chat: "):
            aliases.resolve(parse_reference(missing))


def test_previous_follows_the_moves_of_stable(versions: list[str], aliases: Aliases) -> None:
    previous = alias_of("chat", "previous")
    aliases.move(STABLE, versions[0])
    assert previous not in aliases.all()
    for number in (1, 1, 2):
        aliases.move(STABLE, versions[number])
    assert aliases.all()[previous] == versions[1]
    aliases.move(STABLE, aliases.resolve(parse_reference("chat@previous")))
    assert (aliases.all()[STABLE], aliases.all()[previous]) == (versions[1], versions[2])
    moves = [(move.old, move.new) for move in aliases.moves(STABLE)]
    assert moves == [
        (versions[2], versions[1]),
        (versions[1], versions[2]),
        (versions[0], versions[1]),
        (ABSENT, versions[0]),
    ]
    with pytest.raises(StoreError, match="follows chat@stable"):
        aliases.move(previous, versions[0])


def test_a_move_expects_what_was_there(versions: list[str], aliases: Aliases) -> None:
    aliases.move(STABLE, versions[0], expect=ABSENT)
    for wrong in (ABSENT, versions[1]):
        with pytest.raises(StoreError, match=f"chat@stable is {versions[0]}, expected"):
            aliases.move(STABLE, versions[2], expect=wrong)
    with pytest.raises(StoreError, match="does not exist, expected"):
        aliases.move(alias_of("chat", "canary"), versions[0], expect=versions[0])
    assert aliases.all()[STABLE] == versions[0]


def test_an_alias_moves_while_another_process_imports(
    versions: list[str], aliases: Aliases, store: ModelStore
) -> None:
    aliases.move(STABLE, versions[0])
    with store.writing():
        moved = run(store, "alias", "chat@stable", "chat:v1")
        assert moved.communicate(timeout=TIMEOUT_S)[1].decode().startswith("chat@stable is ")
    assert aliases.all()[STABLE] == versions[1]


def test_no_alias_points_to_what_is_no_version_of_its_model(
    versions: list[str], aliases: Aliases
) -> None:
    for pointer, digest in ((STABLE, f"sha256:{'0' * 64}"), (alias_of("code", "x"), versions[0])):
        with pytest.raises(StoreError, match="has no version"):
            aliases.move(pointer, digest)


def test_the_last_moves_are_remembered(
    versions: list[str], aliases: Aliases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.aliases.MAX_MOVES", 3)
    for number in range(6):
        aliases.move(STABLE, versions[number % 3])
    ways = [(move.old, move.new) for move in aliases.moves(STABLE)]
    assert ways == [(versions[n - 1], versions[n]) for n in (2, 1, 0)]
    assert len(aliases.moves(alias_of("chat", "previous"))) == 3


def test_what_an_alias_or_tag_names_is_never_removed(
    versions: list[str], aliases: Aliases, store: ModelStore
) -> None:
    aliases.move(STABLE, versions[0])
    with store.writing() as writer:
        with pytest.raises(StoreError, match=r"is chat@stable, chat:v0; it stays: remove those"):
            remove(writer, aliases, parse_reference(f"chat@{versions[0]}"))
        assert remove(writer, aliases, parse_reference("chat@stable")).digest is None
        assert collect(writer).num_blobs == 0
        assert remove(writer, aliases, parse_reference("chat:v0")).digest == versions[0]
        # Its manifest, config and README; other versions share the rest.
        assert collect(writer).num_blobs == 3
    assert [entry.digest for entry in store.entries()] == sorted(versions[1:])
    assert faults(store) == []
    with pytest.raises(StoreError, match="has no version"):
        aliases.move(STABLE, versions[0])


def test_what_is_served_stays_until_it_is_not(
    versions: list[str],
    aliases: Aliases,
    store: ModelStore,
    model: Path,
    add: Callable[..., Imported],
) -> None:
    with opened(store, versions[0]) as (view, _):
        replace_readme(model, "version 0")
        assert add(model).digest == versions[0], "another import leaves its lock alone"
        with store.writing() as writer:
            remove(writer, aliases, parse_reference("chat:v0"))
            found = collect(writer)
        assert (found.num_blobs, found.in_use) == (0, [versions[0]])
        assert (view / "README.md").read_text() == "version 0"
    with store.writing() as writer:
        assert collect(writer).num_blobs == 3
    assert not view.exists()
    with pytest.raises(StoreError, match=r"no longer has version"), opened(store, versions[0]):
        pytest.fail("it was opened")


def test_nothing_is_collected_while_a_manifest_cannot_be_read(
    versions: list[str], aliases: Aliases, store: ModelStore
) -> None:
    with store.writing() as writer:
        remove(writer, aliases, parse_reference("chat:v0"))
        store.blob_path(versions[1]).chmod(0o644)
        store.blob_path(versions[1]).write_bytes(b"{}")
        before = sorted(store.blobs.iterdir())
        with pytest.raises(StoreError, match="import the model again"):
            collect(writer)
    assert sorted(store.blobs.iterdir()) == before


def test_an_import_leaves_a_tag_of_another_version_where_it_is(
    versions: list[str], aliases: Aliases, model: Path, add: Callable[..., Imported]
) -> None:
    replace_readme(model, "version 3")
    with pytest.raises(StoreError, match=r"is imported, but chat:v0 is .* --expect sha256:"):
        add(model, tag="v0")
    assert aliases.all()[tag_of("chat", "v0")] == versions[0]
    replace_readme(model, "version 0")
    assert add(model, tag="v0").digest == versions[0], "the same again is no conflict"


def test_a_tag_moves_only_when_what_it_is_is_expected(
    versions: list[str], store: ModelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--store", str(store.root))
    assert main(("model", "tag", "chat:v1", "chat:v0", *where)) == 2
    assert f"move this one with --expect {versions[0]}" in capsys.readouterr().err
    assert main(("model", "tag", "chat:v1", "v0", "--expect", versions[0], *where)) == 0
    assert main(("model", "tag", "chat:v1", "code:v0", *where)) == 2
    assert main(("model", "list", "--json", *where)) == 0
    named = {row["digest"]: row["named"] for row in json.loads(capsys.readouterr().out)}
    assert named[versions[1]] == ["chat:v0", "chat:v1"]


def test_of_processes_that_move_an_alias_at_once_exactly_one_wins(
    versions: list[str], aliases: Aliases, store: ModelStore
) -> None:
    aliases.move(STABLE, versions[0])
    processes = [
        run(store, "alias", "chat@stable", f"chat:v{1 + number % 2}", "--expect", versions[0])
        for number in range(4)
    ]
    ended = [process.wait(TIMEOUT_S) for process in processes]
    said = [process.communicate()[1].decode() for process in processes]
    assert sorted(ended) == [0, 2, 2, 2], said
    winner = versions[1 + ended.index(0) % 2]
    assert aliases.all()[STABLE] == winner
    assert sum(f"is {winner}, expected {versions[0]}" in text for text in said) == 3


def test_processes_that_import_at_once_share_a_store(model: Path, store: ModelStore) -> None:
    processes = [
        run(store, "import", str(model), "--name", name, "--tag", "v1") for name in ("chat", "code")
    ]
    done = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], done
    assert len({output for output, _ in done}) == 1
    assert [entry.name for entry in store.entries()] == ["chat", "code"]
    assert list(map(str, Aliases(store).all())) == [str(tag_of(n, "v1")) for n in ("chat", "code")]
    assert faults(store) == []


def test_a_writer_waits_for_another_until_its_deadline(store: ModelStore) -> None:
    with (
        store.writing(),
        pytest.raises(StoreError, match=r"process \d+ has been writing .* for 0 s; wait for it"),
        store.writing(timeout_s=0.0),
    ):
        pytest.fail("there were two writers")


def run(store: ModelStore, *command: str) -> forked.Popen:
    return forked.Popen(
        [forked.TRIOLET, "model", *command, "--store", str(store.root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
