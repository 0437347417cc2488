"""Tests of `triolet model probe`, and of workers that check stored golden tokens."""

from __future__ import annotations

import json
import struct
import subprocess
from typing import TYPE_CHECKING, Final

import msgspec
import pytest
import xxhash

from ops.cli import main
from ops.models.model_directory import demo_model_path
from store.layout import ModelStore
from store.measured import Golden, KeptMeasurement, keep_measured, measured_of
from store.referrers import GOLDEN_TYPE
from tests import forked
from tests.adapters import write_adapter
from triolet.status import WorkerReady, parse_report

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S: Final = 60.0
SETTINGS: Final = (
    "worker.engine.kv_pool_bytes=4MiB",
    "worker.engine.threads=1",
    "worker.engine.snapshots.min_bytes=0",
    # Keep the measurement short.
    "worker.engine.max_num_batched_tokens=64",
    "worker.engine.max_model_len=128",
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of packed weights."""
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, packed: Path) -> ModelStore:
    """A store with the demo model as `chat`, already probed; tests must not change it."""
    root = tmp_path_factory.mktemp("probed") / "store"
    assert main(("model", "import", "demo", "--name", "chat", "--store", str(root))) == 0
    store = ModelStore(root)
    assert probe(store, packed) == 0
    return store


def options(store: ModelStore, packed: Path) -> list[str]:
    places = (f"fleet.store={store.root}", f"worker.engine.snapshots.folder={packed}")
    return ["chat", *(word for one in (*SETTINGS, *places) for word in ("--set", one))]


def golden_of(store: ModelStore) -> tuple[Golden, Path]:
    """Return the only golden tokens of a store, and their file."""
    (entry,) = store.entries()
    (kept,) = measured_of(store, entry.digest, GOLDEN_TYPE)
    assert isinstance(kept, KeptMeasurement)
    assert isinstance(kept.said, Golden)
    return kept.said, kept.path


def probe(store: ModelStore, packed: Path, *more: str) -> int:
    return main(("model", "probe", *options(store, packed), *more))


def worker(store: ModelStore, packed: Path, folder: Path, *more: str) -> tuple[int, bytes, str]:
    """Start a decode worker process, stop it when it is ready, and return how it ended."""
    command = [forked.TRIOLET, "decode", *options(store, packed), *more]
    for name in ("control", "kv"):
        command += ["--set", f"decode.{name}_address=ipc://{folder}/{name}"]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = b""
        for line in process.stdout:
            said += line
            if isinstance(parse_report(line), WorkerReady):
                process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said, errors.decode()


def flip(snapshot: Path) -> None:
    """Change a weight of a snapshot and update its digests."""
    tail = struct.Struct("<Q16s8s")
    content = snapshot.read_bytes()
    num_listed, _, magic = tail.unpack_from(content, len(content) - tail.size)
    first = len(content) - tail.size - num_listed
    listed = msgspec.json.decode(content[first : first + num_listed])
    weights = bytearray(content[:first])
    largest = max(listed["entries"], key=lambda one: one[2])
    weights[largest[1] + 1] ^= 0x40  # a bit of a bf16 exponent
    listed["digest"] = xxhash.xxh3_128(weights).hexdigest()
    encoded = msgspec.json.encode(listed)
    end = tail.pack(len(encoded), xxhash.xxh3_128(encoded).digest(), magic)
    snapshot.write_bytes(bytes(weights) + encoded + end)


def test_golden_tokens_and_capacity_are_kept_and_shown(
    store: ModelStore, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe(store, packed) == 0
    printed = json.loads(capsys.readouterr().out)
    golden, path = golden_of(store)
    assert msgspec.convert(printed["golden"], Golden) == golden
    assert golden.key.host == "any"
    assert [len(one.golden_ids) for one in golden.prompts] == [4, 4]
    assert json.loads(path.read_bytes()) == printed["golden"]
    capacity = printed["capacity"]
    assert capacity["key"]["host"].endswith(",1-threads")
    assert capacity["prefill_tokens_per_s"] > 0.0
    assert capacity["load_s"] > 0.0
    assert main(("model", "show", "chat", "--store", str(store.root))) == 0
    shown = capsys.readouterr()
    assert "golden" not in shown.out, "the manifest does not change"
    assert f"golden tokens for {golden.key}: {list(golden.prompts[0].golden_ids)}" in shown.err
    assert f"capacity for {golden.key.backend} bfloat16" in shown.err
    assert probe(store, packed) == 0, "the same tokens may come again"
    assert golden_of(store)[0] == golden
    assert main(("model", "verify", "--store", str(store.root))) == 0


def test_a_worker_computes_the_golden_tokens_of_its_key_and_refuses_other_ones(
    store: ModelStore, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Real worker processes, which load from the store and the packed weights.
    golden, path = golden_of(store)
    if golden.key.backend != "native":
        pytest.skip("the kernels are not built here, so there are no packed weights to damage")
    assert worker(store, packed, tmp_path)[0] == 0
    (snapshot,) = packed.glob("*.packed")
    flip(snapshot)
    code, said, errors = worker(store, packed, tmp_path)
    assert code == 2
    assert b"worker_ready" not in said
    first = golden.prompts[0]
    assert (
        f"the model's tokens differ from the golden tokens in {path}: after the prompt " in errors
    )
    assert f"{list(first.token_ids)} expected {list(first.golden_ids)}, got [" in errors
    assert "`triolet model probe REF --replace`" in errors
    capsys.readouterr()
    assert probe(store, packed) == 2, "a machine that computes wrongly does not decide"
    assert (
        "the stored ones are kept: find out which machine computes wrongly"
        in capsys.readouterr().err
    )
    assert golden_of(store)[0] == golden
    # Another dtype is another key, for which nothing is stored.
    assert worker(store, packed, tmp_path, "--set", "worker.engine.dtype=float32")[0] == 0
    snapshot.unlink()
    assert worker(store, packed, tmp_path)[0] == 0


def test_golden_tokens_that_no_worker_can_check_are_refused(
    store: ModelStore, packed: Path, tmp_path: Path
) -> None:
    golden, _ = golden_of(store)
    (entry,) = store.entries()
    beyond = msgspec.structs.replace(golden.prompts[0], golden_ids=(1 << 20,))
    with store.writing() as writer:
        wrong = msgspec.structs.replace(golden, prompts=(beyond,))
        keep_measured(writer, entry.digest, [wrong])
    code, _, errors = worker(store, packed, tmp_path)
    assert (code, "has golden tokens up to 1048576" in errors) == (2, True), errors
    _, path = golden_of(store)
    path.chmod(0o644)
    path.write_bytes(b"{}")
    code, _, errors = worker(store, packed, tmp_path)
    assert (code, f"{path} holds sha256:" in errors) == (2, True), errors
    assert probe(store, packed, "--replace") == 0
    assert golden_of(store)[0] == golden


def test_a_configuration_of_a_whole_fleet_is_none_of_a_probe_s_concern(
    store: ModelStore, packed: Path, tmp_path: Path
) -> None:
    file = tmp_path / "triolet.toml"
    file.write_text(
        '[models.small]\nref = "chat"\n[models.large]\nref = "chat"\n'
        '[auto]\nladder = ["small", "large"]\n'
        f'[server.tenants]\nfile = "{tmp_path / "none.json"}"\n'
    )
    assert probe(store, packed, "--config", str(file)) == 0


def test_an_adapter_is_none_that_can_be_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "sql", demo_model_path(), 1, ("q_proj",)).path
    store = ("--store", str(tmp_path / "store"))
    assert main(("model", "import", str(adapter), "--name", "chat-sql", *store)) == 0
    capsys.readouterr()
    assert main(("model", "probe", "chat-sql", *store)) == 2
    said = capsys.readouterr().err
    assert "chat-sql is a LoRA adapter, which needs its base model" in said
    for named in ("chat-sql", str(adapter)):
        assert main(("serve", named, "--set", f"fleet.store={tmp_path / 'store'}")) == 2
        assert f"{named} is a LoRA adapter" in capsys.readouterr().err


def test_a_directory_has_nothing_to_keep_them_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("model", "probe", "demo", "--store", str(tmp_path))) == 2
    assert "demo is not a version in the store; `triolet model import`" in capsys.readouterr().err
