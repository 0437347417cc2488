"""Tests of snapshots of packed weights: they give the same bits as packing again, and damaged or
foreign files are not used."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from engine.load import load_engine
from engine.native.library import load_library
from engine.snapshots.file import SnapshotDamagedError, SnapshotKey, map_snapshot
from engine.snapshots.makers import code_digest
from engine.snapshots.receipts import MAX_RECEIPTS, DigestReceipts
from engine.weights import weights_digest
from store.packed_weights import collect_packed
from tests import forked
from triolet.config import Dtype, EngineConfig, SnapshotConfig, WeightFormat
from triolet.units import MIB

from .driver import generate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.batch import Sampled
    from engine.load import Engine

    from .checkpoints import Checkpoint

PROMPTS = [np.random.default_rng(9).integers(3, 256, size=size).tolist() for size in (5, 40)]
TIMEOUT_S = 60.0
DEMO = Path(__file__).parents[2] / "triolet" / "demo"
LOAD = """
import sys
from pathlib import Path
from engine.load import load_engine
from triolet.config import EngineConfig, SnapshotConfig
from triolet.units import MIB
def load():
    config = EngineConfig(
        kv_pool_bytes=4 * MIB, snapshots=SnapshotConfig(folder=sys.argv[2], min_bytes=0)
    )
    return load_engine(Path(sys.argv[1]), config, lambda *_: None)
"""
AT_ONCE = LOAD + "sys.stdin.readline(); load()"
STUCK = (
    LOAD
    + """
import time
from engine.native.pieces import Packing
pieces = Packing.pieces
def half(self, *rest):
    for number, piece in enumerate(pieces(self, *rest)):
        if number == 5:
            print("half", flush=True)
            time.sleep(3600)
        yield piece
Packing.pieces = half
load()
"""
)
NO_ROOM = (
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n" + LOAD + "load()"
)
"""A file that may not grow further refuses a write as a full disk does."""
HOMELESS = """
import os, sys
from pathlib import Path
from engine.snapshots.folder import Snapshots
from triolet.config import SnapshotConfig
for name in ("HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
os.setuid(54321)
print(Snapshots(SnapshotConfig(min_bytes=0), [Path(sys.argv[1])]).weights_digest())
"""


pytestmark = pytest.mark.skipif(load_library() is None, reason="the kernels are not built here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def load(path: Path, folder: Path | None, **more: Any) -> tuple[Engine, list[str]]:  # noqa: ANN401
    """Return an engine and the names of log events about its weights. Without a folder, no
    snapshot."""
    kept = more.pop("snapshots", {})
    snapshots = SnapshotConfig(keep=folder is not None, folder=str(folder), min_bytes=0, **kept)
    config = EngineConfig(kv_pool_bytes=4 * MIB, snapshots=snapshots, **more)
    with capture_logs() as logs:
        engine = load_engine(path, config, lambda *_: None)
    return engine, [line["event"].removeprefix("packed_weights_") for line in logs]


def answers(engine: Engine) -> list[list[Sampled]]:
    """Return greedy tokens with the top log-probabilities."""
    return generate(engine, PROMPTS, 8)


def snapshot_of(folder: Path) -> Path:
    [path] = folder.glob("*.packed")
    return path


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama-biases", {}),
        ("quantised", {}),
        ("quantised", {"dtype": Dtype.FLOAT32}),
        ("qwen2-tied", {"dtype": Dtype.BFLOAT16}),
        ("qwen3", {"dtype": Dtype.BFLOAT16}),
        ("mistral-sharded", {}),
    ],
)
def test_with_a_snapshot_a_model_says_the_same(
    checkpoint: Callable[[str], Checkpoint],
    quantised: Path,
    folder: Path,
    family: str,
    fields: dict[str, Any],
) -> None:
    path = quantised if family == "quantised" else checkpoint(family).path
    plain, said = load(path, None, **fields)
    assert said == []
    for event in ("kept", "mapped"):
        engine, said = load(path, folder, **fields)
        assert said == [event]
        assert answers(engine) == answers(plain)
        assert engine.fingerprint == plain.fingerprint
    assert snapshot_of(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def flipped(content: bytes, at: int) -> bytes:
    at %= len(content)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: flipped(content, 0),
        lambda content: flipped(content, len(content) // 2),
        lambda content: flipped(content, -100),  # in the list of pieces
        lambda content: flipped(content, -20),  # in that list's digest
        lambda content: flipped(content, -32),  # in that list's length
        lambda content: flipped(content, -1),
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content + b"\0",
        lambda content: b"",
        lambda content: bytes(len(content)),
        lambda content: os.urandom(100),
    ],
)
def test_a_damaged_snapshot_is_found_and_written_anew(
    checkpoint: Callable[[str], Checkpoint], folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = checkpoint("llama").path
    expected = answers(load(path, folder)[0])
    snapshot = snapshot_of(folder)
    sound = snapshot.read_bytes()
    snapshot.write_bytes(damage(sound))
    engine, said = load(path, folder)
    assert said == ["refused", "kept"]
    assert answers(engine) == expected
    assert snapshot.read_bytes() == sound


def test_the_snapshot_of_another_model_or_of_other_settings_is_not_used(
    checkpoint: Callable[[str], Checkpoint], folder: Path
) -> None:
    llama, tied = checkpoint("llama").path, checkpoint("llama3-tied").path
    load(llama, folder)
    first = snapshot_of(folder)
    assert load(tied, folder)[1] == ["kept"]
    [other] = set(folder.glob("*.packed")) - {first}
    first.write_bytes(other.read_bytes())
    assert load(llama, folder)[1] == ["refused", "kept"]


def test_weights_as_they_are_and_widened_have_snapshots_of_their_own(
    quantised: Path, folder: Path
) -> None:
    assert load(quantised, folder)[1] == ["kept"]
    assert load(quantised, folder, weights=WeightFormat.DTYPE)[1] == ["kept"]
    sizes = sorted(path.stat().st_size for path in folder.glob("*.packed"))
    assert sizes[0] < sizes[1] / 2, "bfloat16 takes more than twice as much"


def test_what_another_release_has_packed_is_not_used(
    checkpoint: Callable[[str], Checkpoint],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, library = checkpoint("llama").path, load_library()
    assert library is not None
    load(path, folder)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "weights.py").write_text("a release")
    earlier = code_digest(tmp_path)
    (tmp_path / "engine" / "weights.py").write_text("another")
    monkeypatch.setattr("engine.backend.CODE_DIGEST", code_digest(tmp_path))
    assert load(path, folder)[1] == ["kept"]
    monkeypatch.setattr("engine.backend.CODE_DIGEST", earlier)
    assert load(path, folder)[1] == ["kept"]
    monkeypatch.setattr(library, "digest", "of other panels")
    assert load(path, folder)[1] == ["kept"]
    monkeypatch.undo()
    assert load(path, folder)[1] == ["mapped"]


def test_weights_from_elsewhere_have_a_snapshot_of_their_own(
    checkpoint: Callable[[str], Checkpoint], folder: Path, tmp_path: Path
) -> None:
    signed = checkpoint("llama").path
    forged = tmp_path / "forged"
    shutil.copytree(checkpoint("llama").path, forged)
    # Equal bytes at another path must not be taken for the same weights.
    assert load(forged, folder)[1] == ["kept"]
    assert load(signed, folder)[1] == ["kept"]
    (tmp_path / "link").symlink_to(signed)
    assert load(tmp_path / "link", folder)[1] == ["mapped"]


def test_weights_that_changed_have_another_snapshot(
    checkpoint: Callable[[str], Checkpoint], folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in checkpoint("llama").path.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = model / "model.safetensors"
    before, _ = load(model, folder)
    times = weights.stat()
    weights.write_bytes(flipped(weights.read_bytes(), -2))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    after, said = load(model, folder)
    assert said == ["kept"]
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_snapshot_that_others_may_write_is_refused(
    checkpoint: Callable[[str], Checkpoint], folder: Path, mode: int
) -> None:
    path = checkpoint("llama").path
    load(path, folder)
    snapshot_of(folder).chmod(mode)
    assert load(path, folder)[1] == ["refused", "kept"]
    assert snapshot_of(folder).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write_is_not_used(
    checkpoint: Callable[[str], Checkpoint], folder: Path, mode: int
) -> None:
    path = checkpoint("llama").path
    load(path, folder)
    before = sorted(folder.iterdir())
    folder.chmod(mode)
    assert load(path, folder)[1] == ["not_kept"]
    assert sorted(folder.iterdir()) == before


def test_a_link_in_the_place_of_a_snapshot_is_not_followed(
    checkpoint: Callable[[str], Checkpoint], folder: Path, tmp_path: Path
) -> None:
    path = checkpoint("llama").path
    load(path, folder)
    snapshot = snapshot_of(folder)
    snapshot.rename(tmp_path / "elsewhere")
    snapshot.symlink_to(tmp_path / "elsewhere")
    assert load(path, folder)[1] == ["not_kept"]
    assert (tmp_path / "elsewhere").exists()


def test_the_least_recently_used_snapshot_makes_room(
    checkpoint: Callable[[str], Checkpoint], folder: Path, tmp_path: Path
) -> None:
    first, second, third = (checkpoint(name).path for name in ("llama", "llama-biases", "qwen3"))
    load(first, folder)
    kept = snapshot_of(folder)
    load(second, folder)
    os.utime(kept, (0, 0))
    assert load(first, folder)[1] == ["mapped"]  # loading counts as a use
    load(third, tmp_path / "elsewhere")
    most = kept.stat().st_size + snapshot_of(tmp_path / "elsewhere").stat().st_size
    assert load(third, folder, snapshots={"max_bytes": most})[1] == ["removed", "kept"]
    assert kept.exists()
    assert load(second, folder, snapshots={"max_bytes": 1})[1] == ["not_kept"]
    assert len(list(folder.glob("*.packed"))) == 2
    assert list(folder.glob("*.unfinished")) == []


@pytest.mark.slow
def test_a_snapshot_that_is_mapped_is_not_removed_to_make_room(
    checkpoint: Callable[[str], Checkpoint], folder: Path, tmp_path: Path
) -> None:
    first, second = (checkpoint(name).path for name in ("llama", "llama-biases"))
    load(second, tmp_path / "elsewhere")
    bound = {"max_bytes": snapshot_of(tmp_path / "elsewhere").stat().st_size}
    used = [load(first, folder)[0], load(first, folder)[0]]
    kept = snapshot_of(folder)
    while used:
        assert load(second, folder, snapshots=bound)[1] == ["not_kept"]
        assert kept.exists()
        used.pop()
        gc.collect()
    assert load(second, folder, snapshots=bound)[1] == ["removed", "kept"]
    assert not kept.exists()


@pytest.mark.slow
def test_unused_packed_weights_are_collected_and_mapped_ones_stay(
    checkpoint: Callable[[str], Checkpoint], folder: Path
) -> None:
    used, _ = load(checkpoint("llama").path, folder)
    mapped = snapshot_of(folder)
    unused, others = folder / f"{'0123' * 8}.packed", folder / "notes.packed"
    for path in (unused, others):
        path.write_bytes(b"12345")
    assert collect_packed(folder) == (1, 5, 1)
    assert mapped.exists()
    assert others.exists()
    size = mapped.stat().st_size
    del used
    gc.collect()
    assert collect_packed(folder) == (1, size, 0)
    assert collect_packed(folder / "nowhere") == (0, 0, 0)


def test_weights_below_the_bound_are_packed_each_time(
    checkpoint: Callable[[str], Checkpoint], folder: Path
) -> None:
    config = EngineConfig(kv_pool_bytes=4 * MIB, snapshots=SnapshotConfig(folder=str(folder)))
    load_engine(checkpoint("llama").path, config, lambda *_: None)
    assert not folder.exists()


def test_weights_are_mapped_and_nowhere_copied(folder: Path) -> None:
    """With default settings, the demo model's resident weights exceed its file by at most 5 %."""
    config = EngineConfig(kv_pool_bytes=4 * MIB, snapshots=SnapshotConfig(folder=str(folder)))
    engine = load_engine(DEMO, config, lambda *_: None)
    parts = Path("/proc/self/smaps").read_text().split("VmFlags:")
    mapped = [part for part in parts if str(folder) in part]
    resident = sum(1024 * int(kib) for kib in re.findall(r"^Rss: +(\d+)", "".join(mapped), re.M))
    assert 0 < resident <= 1.05 * (DEMO / "model.safetensors").stat().st_size
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*\.packed", "".join(mapped), re.M)
    [(first, end)] = [(int(low, 16), int(high, 16)) for low, high in ranges]
    addresses = [piece.data.ctypes.data for piece in engine.runner.model._packed._pieces.values()]
    assert all(first <= address < end for address in addresses)


def started(program: str, model: Path, folder: Path) -> forked.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forked.Popen([sys.executable, "-c", program, str(model), str(folder)], **pipes)


@pytest.fixture
def processes() -> Iterator[list[forked.Popen]]:
    running: list[forked.Popen] = []
    yield running
    for process in running:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def test_of_processes_that_start_at_once_one_packs(
    checkpoint: Callable[[str], Checkpoint], folder: Path, processes: list[forked.Popen]
) -> None:
    path = checkpoint("llama").path
    processes += [started(AT_ONCE, path, folder) for _ in range(3)]
    said = ""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
        said += (output + errors).decode()
    assert said.count("packed_weights_kept") == 1
    assert said.count("packed_weights_mapped") == 2
    assert load(path, folder)[1] == ["mapped"]
    assert list(folder.glob("*.unfinished")) == []


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_counts(
    checkpoint: Callable[[str], Checkpoint], folder: Path, processes: list[forked.Popen]
) -> None:
    path = checkpoint("llama").path
    process = started(STUCK, path, folder)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    [unfinished] = folder.glob("*.unfinished")
    assert unfinished.stat().st_size > 0
    process.kill()
    process.wait(TIMEOUT_S)
    assert load(path, folder)[1] == ["kept"]
    assert load(path, folder)[1] == ["mapped"]
    assert not unfinished.exists()


def test_what_a_killed_process_left_of_other_weights_is_removed(
    checkpoint: Callable[[str], Checkpoint], folder: Path
) -> None:
    folder.mkdir(mode=0o700)
    left = [folder / f"{'0123' * 8}.{suffix}" for suffix in ("unfinished", "4567")]
    # The configured folder may contain other files, of any age.
    others = [folder / name for name in ("notes.txt", "thesis.2024", "model.unfinished")]
    for path in (*left, *others):
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    (folder / "pictures").mkdir()
    os.utime(folder / "pictures", (0, 0))
    assert load(checkpoint("llama").path, folder)[1] == ["kept"]
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_without_room_on_the_disk_weights_are_packed_as_before(
    checkpoint: Callable[[str], Checkpoint], folder: Path, processes: list[forked.Popen]
) -> None:
    process = started(NO_ROOM, checkpoint("llama").path, folder)
    processes.append(process)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert b"packed_weights_not_kept" in output + errors
    assert [path for path in folder.iterdir() if path.suffix != ".digest"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without a home")
def test_a_user_without_a_home_has_no_snapshots(
    folder: Path, processes: list[forked.Popen]
) -> None:
    process = started(HOMELESS, Path("/bin/sh"), folder)
    processes.append(process)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert weights_digest([Path("/bin/sh")]).encode() in output
    assert b"this user has no home directory: set XDG_CACHE_HOME" in output + errors


def test_a_receipt_says_the_digest_of_files_that_have_not_changed(tmp_path: Path) -> None:
    receipts = DigestReceipts(tmp_path / "receipts")
    (tmp_path / "receipts").mkdir()
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"weights")
    digest = weights_digest(files)
    receipts.write(files, digest, time.time_ns())
    assert receipts.find(files) is None, "a write just after the read would not show"
    later_ns = time.time_ns() + 10**10
    receipts.write(files, digest, later_ns)
    assert receipts.find(files) == digest
    assert receipts.find(files[:1]) is None
    [receipt] = (tmp_path / "receipts").iterdir()
    content = receipt.read_bytes()
    receipt.write_bytes(content[:-5])
    assert receipts.find(files) is None
    receipt.write_bytes(content)
    times = files[0].stat()
    files[0].write_bytes(b"sthgiew")
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert receipts.find(files) is None


def test_receipts_are_bounded(tmp_path: Path) -> None:
    receipts = DigestReceipts(tmp_path / "receipts")
    (tmp_path / "receipts").mkdir()
    for number in range(MAX_RECEIPTS + 3):
        file = tmp_path / f"model-{number}"
        file.write_bytes(b"weights")
        receipts.write([file], "digest", time.time_ns() + 10**10)
    assert len(list((tmp_path / "receipts").iterdir())) == MAX_RECEIPTS


def test_a_file_without_the_expected_key_is_no_snapshot(
    checkpoint: Callable[[str], Checkpoint], folder: Path
) -> None:
    load(checkpoint("llama").path, folder)
    with snapshot_of(folder).open("rb") as file, pytest.raises(SnapshotDamagedError, match="holds"):
        map_snapshot(file.fileno(), SnapshotKey("other", "", "", "", "", ""))
