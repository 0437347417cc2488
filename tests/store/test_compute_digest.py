"""Tests of the compute digest: versions that compute the same bits share golden tokens and
workers."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Final

import pytest

from store.compute_digest import compute_digest
from store.measured import golden_for
from triolet.config import WeightFormat

from .test_measured import GOLDEN, KEY, keep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ops.models.importing import Imported
    from store.layout import ModelStore

SAMPLING: Final = "generation_config.json"


def changed(model: Path, name: str, **fields: object) -> Path:
    """Return a copy of a model with some fields changed in one of its JSON files."""
    copy = model.with_name(f"{name}-{len(list(model.parent.iterdir()))}")
    shutil.copytree(model, copy)
    said = json.loads((copy / name).read_text()) | fields
    (copy / name).unlink()
    (copy / name).write_text(json.dumps(said))
    return copy


def with_other_weights(model: Path) -> Path:
    """Return a copy of a model with one bit of its weights changed."""
    copy = changed(model, SAMPLING)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    return copy


@pytest.fixture
def versions(
    model: Path, store: ModelStore, add: Callable[..., Imported]
) -> tuple[list[str], list[str]]:
    """Two versions that compute alike, the first with golden tokens; versions that do not."""
    alike = [add(model, tag="v1").digest]
    keep(store, alike[0], GOLDEN)
    warm = changed(model, SAMPLING, temperature=0.3)
    (warm / "chat_template.jinja").write_text("{{ messages[0].content }}")
    alike.append(add(warm, tag="v2").digest)
    others = [
        add(changed(model, SAMPLING, eos_token_id=[7]), tag="ends").digest,
        add(changed(model, "tokenizer.json"), tag="tokenizer").digest,
        add(changed(model, "tokenizer_config.json", note="x"), tag="special").digest,
        add(with_other_weights(model), tag="weights").digest,
        add(model, tag="dtype", weights=WeightFormat.DTYPE).digest,
    ]
    return alike, others


def test_versions_that_differ_in_a_sampling_default_share_what_was_computed(
    store: ModelStore, versions: tuple[list[str], list[str]]
) -> None:
    (first, second), others = versions
    digests = {one: compute_digest(store, store.manifest(one)) for one in (first, second, *others)}
    assert first != second
    assert digests[first] == digests[second]
    assert len(set(digests.values())) == 1 + len(others), "every other change counts"
    found = golden_for(store.root, second, KEY)
    assert found is not None
    assert found == golden_for(store.root, first, KEY)
    assert [golden_for(store.root, one, KEY) for one in others] == [None] * len(others)


def test_golden_tokens_of_another_model_are_not_asked(
    model: Path, store: ModelStore, add: Callable[..., Imported]
) -> None:
    keep(store, add(changed(model, SAMPLING, temperature=0.3), name="other").digest, GOLDEN)
    assert golden_for(store.root, add(model).digest, KEY) is None


@pytest.mark.parametrize("damaged", ["golden tokens", "sampling defaults"])
def test_damage_to_one_version_keeps_no_worker_of_another_from_starting(
    store: ModelStore, versions: tuple[list[str], list[str]], damaged: str
) -> None:
    (first, second), _ = versions
    found = golden_for(store.root, first, KEY)
    assert found is not None
    path = found[1]
    if damaged == "sampling defaults":
        layers = store.manifest(first).layers
        path = next(store.blob_path(one.digest) for one in layers if one.file_name == SAMPLING)
    path.chmod(0o644)
    path.write_bytes(b"[]")
    assert golden_for(store.root, second, KEY) is None
