"""Tests of golden tokens and capacity stored with a version: replaced by key, checked, and removed
with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from store.aliases import Aliases
from store.collect import collect, remove
from store.manifest import canonical
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
    read_measured,
    without_known,
)
from store.reference import parse_reference
from store.referrers import CAPACITY_TYPE, GOLDEN_TYPE, ReferrerFault, artefact
from triolet.errors import ModelError, StoreError

from .conftest import faults
from .test_cut_off import KILLED_AT, UNREACHED, ran

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ops.models.importing import Imported
    from store.layout import ModelStore

DIGEST: Final = f"sha256:{'a' * 64}"
KEY: Final = MeasurementKey("native", "bfloat16", "native-1-0123")
OTHER: Final = MeasurementKey("sdpa", "float32", "sdpa,torch-2")
GOLDEN: Final = Golden(KEY, (GoldenPrompt((1, 2), (3, 4)),))
CAPACITY: Final = MeasuredCapacity(
    MeasurementKey("native", "bfloat16", "native-1-0123", "box"), 1e3, 1e-3, 0, 0, 1
)
KEEPING: Final = """
from store.layout import ModelStore
from store.measured import Golden, GoldenPrompt, MeasurementKey, keep_measured

def main(words):
    kept = ModelStore(__import__("pathlib").Path(words[-1]))
    (entry,) = kept.entries()
    golden = Golden(MeasurementKey("b", "d", "a"), (GoldenPrompt((1,), (int(words[1]),)),))
    with kept.writing() as writer:
        keep_measured(writer, entry.digest, [golden])
    return 0
"""
"""Replaces the CLI: does what `triolet model probe` does after computing."""


@pytest.fixture
def digest(model: Path, add: Callable[..., Imported]) -> str:
    """A version `chat:v1`."""
    return add(model, tag="v1", may_link=True).digest


def keep(store: ModelStore, digest: str, *measured: Golden | MeasuredCapacity) -> None:
    with store.writing() as writer:
        keep_measured(writer, digest, list(measured))


def said(store: ModelStore, digest: str) -> list[Golden | MeasuredCapacity]:
    found = [
        one for kind in (GOLDEN_TYPE, CAPACITY_TYPE) for one in measured_of(store, digest, kind)
    ]
    return [one.said for one in found if isinstance(one, KeptMeasurement)]


def test_one_measurement_of_a_key_is_kept_and_it_goes_with_its_version(
    store: ModelStore, digest: str
) -> None:
    keep(store, digest, GOLDEN, CAPACITY)
    newer = msgspec.structs.replace(GOLDEN, prompts=(GoldenPrompt((1, 2), (5, 6)),))
    elsewhere = msgspec.structs.replace(GOLDEN, key=OTHER)
    keep(store, digest, newer, msgspec.structs.replace(CAPACITY, load_s=2.0))
    keep(store, digest, elsewhere)
    assert set(said(store, digest)) == {
        newer,
        elsewhere,
        msgspec.structs.replace(CAPACITY, load_s=2.0),
    }
    found = golden_for(store.root, digest, KEY)
    assert found is not None
    assert found[0] == newer
    assert (
        golden_for(store.root, digest, MeasurementKey("native", "float32", "native-1-0123")) is None
    )
    with store.writing() as writer:
        assert collect(writer).num_blobs == 4, "what was replaced: two manifests, two layers"
        assert faults(store) == []
        assert len(said(store, digest)) == 3
        remove(writer, Aliases(store), parse_reference("chat:v1"))
        assert store.referrers() == ()
        collect(writer)
    assert set(store.blobs.iterdir()) == set()
    with pytest.raises(StoreError, match="has just been removed"):
        keep(store, digest, GOLDEN)


def test_damaged_golden_tokens_are_named_and_replaced(store: ModelStore, digest: str) -> None:
    keep(store, digest, GOLDEN, CAPACITY)
    found = golden_for(store.root, digest, KEY)
    assert found is not None
    path = found[1]
    path.chmod(0o644)
    path.write_bytes(b"[]")
    (fault,) = faults(store)
    assert f"{path} holds sha256:" in fault
    assert "`triolet model probe` measures it again" in fault
    with pytest.raises(
        ModelError, match=r"holds sha256:.* `triolet model probe` measures them again"
    ):
        golden_for(store.root, digest, OTHER)
    keep(store, digest, GOLDEN)
    assert faults(store) == []
    assert golden_for(store.root, digest, KEY) == (GOLDEN, path)


def test_what_comes_from_elsewhere_replaces_nothing(store: ModelStore, digest: str) -> None:
    keep(store, digest, GOLDEN)
    theirs = msgspec.structs.replace(GOLDEN, prompts=(GoldenPrompt((1, 2), (9, 9)),))
    new = msgspec.structs.replace(GOLDEN, key=OTHER)
    brought = [as_artefact(one, digest, 10) for one in (theirs, new, new, CAPACITY)]
    kept = without_known(store, digest, brought)
    assert [read_measured(one, kind, digest) for kind, one in kept] == [new, CAPACITY]


def changed(**fields: Any) -> bytes:  # noqa: ANN401 (JSON)
    return canonical({**msgspec.to_builtins(GOLDEN), **fields})


@pytest.mark.parametrize(
    "layer",
    [
        b"",
        b"{}",
        b"[" * 10_000,
        changed(prompts=[]),
        changed(prompts=[{"token_ids": [1], "golden_ids": []}]),
        changed(prompts=[{"token_ids": [-1], "golden_ids": [1]}]),
        changed(prompts=[{"token_ids": [1], "golden_ids": [1 << 31]}]),
        changed(prompts=[{"token_ids": [1] * 65, "golden_ids": [1]}]),
        changed(prompts=[{"token_ids": [1], "golden_ids": [1]}] * 9),
        changed(key={"backend": "\x1b[2J", "dtype": "d", "arithmetic": "a"}),
        changed(key={"backend": "b", "dtype": "d", "arithmetic": "a" * 201}),
        changed(key={"backend": "b", "dtype": "d\n", "arithmetic": "a"}),
    ],
)
def test_a_layer_that_is_no_golden_tokens_is_refused(layer: bytes) -> None:
    with pytest.raises(ReferrerFault, match="its layer cannot be read"):
        read_measured(artefact(GOLDEN_TYPE, layer, DIGEST, 10), GOLDEN_TYPE, DIGEST)


def test_an_artefact_of_another_version_type_or_layer_is_refused() -> None:
    _, right = as_artefact(GOLDEN, DIGEST, 10)
    assert read_measured(right, GOLDEN_TYPE, DIGEST) == GOLDEN
    with pytest.raises(ReferrerFault, match="its subject is"):
        read_measured(right, GOLDEN_TYPE, f"sha256:{'b' * 64}")
    with pytest.raises(ReferrerFault, match=r"it is .application/vnd\.triolet\.golden"):
        read_measured(right, CAPACITY_TYPE, DIGEST)
    with pytest.raises(ReferrerFault, match="does not match its manifest"):
        read_measured(right._replace(layer=b"{}"), GOLDEN_TYPE, DIGEST)


@pytest.mark.slow
def test_a_store_is_valid_wherever_keeping_is_killed(
    store: ModelStore, digest: str, whole: bool
) -> None:
    # Needs some processes: only a real one can be killed without running its clean-up.
    program = KILLED_AT.replace("from ops.cli import main\n", KEEPING)
    assert program != KILLED_AT

    def cut_off(at: int, token_id: int) -> Any:  # noqa: ANN401 (of subprocess)
        words = [sys.executable, "-c", program, str(at), str(store.root), str(token_id)]
        return ran(words)

    counted = cut_off(UNREACHED, 0)
    steps = UNREACHED - int(counted.stdout.split()[-1])
    assert steps > 10, "it was not watched"
    moments = range(1, steps + 1) if whole else range(3, steps + 1, max(1, steps // 3))
    for at in moments:
        before = said(store, digest)
        killed = cut_off(at, at)
        assert killed.returncode == -9, killed.stderr
        assert faults(store) == []
        now = said(store, digest)
        assert now == before or now == [
            Golden(MeasurementKey("b", "d", "a"), (GoldenPrompt((1,), (at,)),))
        ]
    assert cut_off(UNREACHED, 0).returncode == 0
    assert list(store.tmp.iterdir()) == []
    with store.writing() as writer:
        collect(writer)
    assert faults(store) == []
    assert len(said(store, digest)) == 1
