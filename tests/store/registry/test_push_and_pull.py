"""Tests of pushing versions to a real registry and pulling them: they come back unchanged, despite
broken connections."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import pytest

from ops.cli import main
from ops.models.importing import WantedImport, import_model
from store.aliases import Aliases
from store.collect import collect
from store.layout import ModelStore
from store.partial import Partials
from store.reference import parse_reference
from store.verify import verify
from tests import forked
from triolet.config import WeightFormat
from triolet.errors import RegistryFailed

from .conftest import digest_in, pulled
from .docker_registry import breaking_proxy, running_registry

if TYPE_CHECKING:
    from pathlib import Path

    from store.registry.pull import Pulled

    from .docker_registry import BreakingProxy, DockerRegistry

BREAK_AT: Final = 4 << 20
"""Bytes of the demo model's 9.4 MiB."""
TIMEOUT_S: Final = 60.0
NO_ROOM: Final = """
import resource, sys

from ops.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.exit(main(["model", *sys.argv[1:]]))
"""


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """A store with the demo model as `chat:v1`. Its weights take a while to transfer."""
    store = ModelStore(tmp_path_factory.mktemp("demo") / "store")
    import_model(store, WantedImport("demo", "chat", "v1", None, WeightFormat.DTYPE, True))
    return store


def run(*arguments: str) -> None:
    assert main(("model", *arguments)) == 0


@pytest.mark.slow
def test_a_version_comes_back_byte_for_byte_and_nothing_is_sent_twice(
    registry: DockerRegistry,
    source: ModelStore,
    store: ModelStore,
    capsys: pytest.CaptureFixture[str],
) -> None:
    location, digest = f"oci://{registry.host}/a/chat:v1", digest_in(source)
    run("push", "chat:v1", location, "--store", str(source.root))
    out, err = capsys.readouterr()
    assert out.strip() == digest
    assert "0 B already there" in err
    before = registry.log.count("PUT")
    run("push", "chat:v1", location, "--store", str(source.root))
    assert "0 B uploaded in 0 blobs" in capsys.readouterr().err
    assert registry.log.count("PUT") == before
    run("pull", location, "--store", str(store.root))
    out, err = capsys.readouterr()
    assert out.strip() == digest
    assert f"chat:v1 is {digest}" in err
    run("verify", "--store", str(store.root))
    blobs = [
        sorted((p.name, p.read_bytes()) for p in one.blobs.iterdir()) for one in (source, store)
    ]
    assert blobs[0] == blobs[1]
    capsys.readouterr()
    run("pull", f"oci://{registry.host}/a/chat@{digest}", "--name", "b", "--store", str(store.root))
    assert ": 0 B downloaded" in capsys.readouterr().err
    assert [(one.name, one.digest) for one in store.entries()] == [("b", digest), ("chat", digest)]
    assert list(map(str, Aliases(store).all())) == ["chat:v1"]


@pytest.mark.slow
def test_a_tag_of_another_version_stays_here_and_there(
    registry: DockerRegistry,
    source: ModelStore,
    demo: ModelStore,
    capsys: pytest.CaptureFixture[str],
) -> None:
    location = f"oci://{registry.host}/moved/chat:v1"
    run("push", "chat:v1", location, "--store", str(source.root))
    assert main(("model", "push", "chat:v1", location, "--store", str(demo.root))) == 1
    words = f"is {digest_in(source)} and stays; push to another tag, or move it with --expect"
    assert words in capsys.readouterr().err
    expected = ("--expect", digest_in(source))
    run("push", "chat:v1", location, "--store", str(demo.root), *expected)
    copy = ModelStore(source.root.parent / "copy")
    shutil.copytree(source.root, copy.root)
    assert main(("model", "pull", location, "--store", str(copy.root))) == 2
    assert f"is pulled, but chat:v1 is {digest_in(source)} and stays" in capsys.readouterr().err
    run("pull", location, "--tag", "v2", "--store", str(copy.root))
    assert Aliases(copy).resolve(parse_reference("chat:v2")) == digest_in(demo)


@pytest.mark.slow
def test_other_programs_read_what_was_pushed(
    registry: DockerRegistry, source: ModelStore, tmp_path: Path
) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed: `apt-get install skopeo` brings it")
    run("push", "chat:v1", f"oci://{registry.host}/s/chat:v1", "--store", str(source.root))
    there = f"docker://{registry.host}/s/chat:v1"
    raw = subprocess.run(
        ["skopeo", "inspect", "--tls-verify=false", "--raw", there],
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    ).stdout
    assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == digest_in(source)
    subprocess.run(
        ["skopeo", "copy", "-q", "--src-tls-verify=false", there, f"oci:{tmp_path}/out:v1"],
        check=True,
        timeout=TIMEOUT_S,
    )
    (entry,) = json.loads((tmp_path / "out" / "index.json").read_text())["manifests"]
    assert entry["digest"] == digest_in(source)
    blobs = {path.name for path in (tmp_path / "out" / "blobs" / "sha256").iterdir()}
    assert blobs == {path.name for path in source.blobs.iterdir()}
    # And back: a version copied into a registry by another program is pulled unchanged.
    back = f"{registry.host}/s/back:v1"
    subprocess.run(
        [
            *("skopeo", "copy", "-q", "--dest-tls-verify=false"),
            *(f"oci:{tmp_path}/out:v1", f"docker://{back}"),
        ],
        check=True,
        timeout=TIMEOUT_S,
    )
    assert pulled(ModelStore(tmp_path / "store"), f"oci://{back}").digest == digest_in(source)


def test_a_pull_goes_on_where_a_killed_registry_left_it(
    tmp_path: Path, demo: ModelStore, store: ModelStore
) -> None:
    with (
        running_registry(tmp_path / "registry") as own,
        breaking_proxy(own.port) as proxy,
    ):
        run("push", "chat:v1", f"oci://{own.host}/chat:v1", "--store", str(demo.root))
        proxy.down_left, proxy.on_break = BREAK_AT, own.kill
        with pytest.raises(RegistryFailed, match=r"was lost or not made: .*bytes of .* are kept"):
            pulled(store, f"oci://{proxy.host}/chat:v1")
        assert not store.is_there, "nothing is a version yet"
        kept = sum(path.stat().st_size for path in Partials(store).folder.glob("*.part"))
        assert kept > 0, "how much of what was sent is read depends on when the connection breaks"
        own.start()
        found, weights = all_of(proxy, store), largest(demo)
        assert found.fetched_bytes == found.total_bytes - kept
        assert f'/blobs/{weights} HTTP/1.1" 206' in own.log
    assert digest_in(store) == digest_in(demo)
    assert verify(store, store.entries()).faults == []
    assert list(Partials(store).folder.glob("*.part")) == []


def all_of(proxy: BreakingProxy, store: ModelStore) -> Pulled:
    return pulled(store, f"oci://{proxy.host}/chat:v1")


def largest(store: ModelStore) -> str:
    return max(store.manifest(digest_in(store)).blobs, key=lambda one: one.size).digest


def test_one_pull_survives_a_connection_that_breaks_off(
    registry: DockerRegistry, demo: ModelStore, store: ModelStore
) -> None:
    run("push", "chat:v1", f"oci://{registry.host}/broken/chat:v1", "--store", str(demo.root))
    with breaking_proxy(registry.port) as proxy:
        proxy.down_left = BREAK_AT
        found = pulled(store, f"oci://{proxy.host}/broken/chat:v1")
        assert found.total_bytes < proxy.num_down < found.total_bytes + BREAK_AT
    assert verify(store, store.entries()).faults == []


@pytest.mark.slow
def test_one_push_survives_a_connection_that_breaks_off(
    registry: DockerRegistry, demo: ModelStore, store: ModelStore
) -> None:
    with breaking_proxy(registry.port) as proxy:
        proxy.up_left = BREAK_AT
        run("push", "chat:v1", f"oci://{proxy.host}/cut/chat:v1", "--store", str(demo.root))
    assert pulled(store, f"oci://{registry.host}/cut/chat:v1").digest == digest_in(demo)


def test_pulls_of_one_version_at_once_share_a_store(
    registry: DockerRegistry, demo: ModelStore, store: ModelStore
) -> None:
    location = f"oci://{registry.host}/twice/chat:v1"
    run("push", "chat:v1", location, "--store", str(demo.root))
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: pulled(store, location), range(2)))
    # Locks belong to open files, so two threads behave like two processes.
    assert sum(one.fetched_bytes for one in both) == both[0].total_bytes
    assert verify(store, store.entries()).faults == []


@pytest.mark.slow
def test_a_pull_that_is_killed_leaves_a_valid_store_and_goes_on(
    registry: DockerRegistry, demo: ModelStore, source: ModelStore, store: ModelStore
) -> None:
    location = f"oci://{registry.host}/killed/chat"
    run("push", "chat:v1", f"{location}:v1", "--store", str(demo.root))
    run("push", "chat:v1", f"{location}:other", "--store", str(source.root))
    run("pull", f"{location}:other", "--store", str(store.root))
    with breaking_proxy(registry.port) as proxy:
        there = f"oci://{proxy.host}/killed/chat:v1"
        process = forked.Popen(
            [forked.TRIOLET, "model", "pull", there, "--store", str(store.root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def kill_once_bytes_are_kept() -> None:
            give_up = time.monotonic() + TIMEOUT_S
            while Partials(store).size(largest(demo)) < 1 << 20 and time.monotonic() < give_up:
                time.sleep(0.01)
            process.kill()

        proxy.on_break, proxy.down_left = kill_once_bytes_are_kept, BREAK_AT
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert [one.digest for one in store.entries()] == [digest_in(source)]
    assert verify(store, store.entries()).faults == []
    found = pulled(store, f"{location}:v1")
    assert found.fetched_bytes < found.total_bytes - (1 << 20) + 1
    assert verify(store, store.entries()).faults == []


@pytest.mark.slow
def test_a_disk_without_room_keeps_what_came_and_names_nothing(
    registry: DockerRegistry, demo: ModelStore, store: ModelStore
) -> None:
    location = f"oci://{registry.host}/full/chat:v1"
    run("push", "chat:v1", location, "--store", str(demo.root))
    command = [sys.executable, "-c", NO_ROOM, "pull", location, "--store", str(store.root)]
    full = forked.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = full.communicate(timeout=TIMEOUT_S)
    assert (full.returncode, out) == (2, b"")
    assert b"File too large" in err
    assert b"make room" in err
    assert not store.is_there
    assert Partials(store).size(largest(demo)) == 1 << 20
    assert pulled(store, location).digest == digest_in(demo)


def test_a_collection_removes_what_pulls_have_left_and_no_running_ones(
    source: ModelStore, store: ModelStore
) -> None:
    partials, digest = Partials(store), digest_in(source)
    with partials.kept():
        with partials.opened(digest) as file:
            file.write(b"begin")
        with store.writing() as writer:
            assert collect(writer).num_blobs == 0
        assert partials.size(digest) == 5
    with store.writing() as writer:
        assert collect(writer)[:2] == (1, 5)
    assert partials.size(digest) == 0
