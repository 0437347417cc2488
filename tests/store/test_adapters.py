"""Tests of LoRA adapter files in the store: each is read completely or refused with a remedy, and
its digest covers its numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from store.adapter_files import CONFIG_FILE, WEIGHTS_FILE, MatrixPlace, read_adapter
from triolet.adapter_keys import adapters_mark, cache_key, digest_bytes, mark_of
from triolet.config import AdapterConfig, EngineConfig, FleetConfig
from triolet.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "base_model.model.model.layers.0."
CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
}
BASE = "sha256:" + "ab" * 32


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    numbers = np.random.default_rng(5)
    return {
        f"{PREFIX}{module}.lora_{matrix}.weight": numbers.standard_normal(shape, dtype=np.float32)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for matrix, shape in (("A", (2, 6)), ("B", (4, 2)))
    }


def write(path: Path, **changes: Any) -> Path:  # noqa: ANN401 (of JSON)
    path.mkdir(exist_ok=True)
    (path / CONFIG_FILE).write_text(json.dumps(CONFIG | changes))
    save_file(tensors(), path / WEIGHTS_FILE)
    return path


def test_an_adapter_is_read_whole(tmp_path: Path) -> None:
    read = read_adapter(write(tmp_path / "a"), BASE, 64)
    assert (read.rank, read.scale) == (2, 4.0)
    assert set(read.matrices) == {
        MatrixPlace(0, module, matrix) for module in ("q_proj", "down_proj") for matrix in "AB"
    }
    one = read.matrices[MatrixPlace(0, "q_proj", "A")]
    wanted = tensors()[f"{PREFIX}self_attn.q_proj.lora_A.weight"]
    assert one.numbers == wanted.tobytes()
    rooted = read_adapter(write(tmp_path / "b", use_rslora=True), BASE, 64)
    assert rooted.scale == pytest.approx(8 / 2**0.5)
    assert rooted.digest != read.digest


def test_the_digest_is_of_numbers_and_base_alone(tmp_path: Path) -> None:
    digest = read_adapter(write(tmp_path / "a"), BASE, 64).digest
    assert len(digest_bytes(digest)) == 32
    named = write(tmp_path / "b", task_type="CAUSAL_LM", lora_dropout=0.1, r=2)
    save_file(dict(reversed(tensors().items())), named / WEIGHTS_FILE, {"format": "pt"})
    assert read_adapter(named, BASE, 64).digest == digest
    assert read_adapter(named, "", 64).digest != digest
    other = load_file(named / WEIGHTS_FILE)
    other[f"{PREFIX}self_attn.q_proj.lora_A.weight"][1, 3] += 1e-6
    save_file(other, named / WEIGHTS_FILE)
    assert read_adapter(named, BASE, 64).digest != digest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
        ({"use_dora": True}, "use_dora asks for DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save asks for whole modules"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern asks for different ranks"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern asks for different scales"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; only 'none'"),
        ({"init_lora_weights": "pissa_niter_4"}, "trains on a changed base; convert"),
        ({"r": 0}, "r is 0; expected a whole number"),
        ({"r": True}, "r is True; expected a whole number"),
        ({"r": 65}, "r is 65, and ranks up to 64 are served; raise worker.engine.max_adapter_rank"),
        ({"r": 3}, r"needs floats \[3, inputs\]|needs floats \[outputs, 3\]"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; expected a number"),
        ({"lora_alpha": 1e300}, r"lora_alpha is 1e\+300; expected a number up to 1e\+06"),
        ({"lora_alpha": 10**400}, "lora_alpha is 10+; expected a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; expected a number"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens asks for activated LoRA"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config asks for a choice among adapters"),
        ({"use_rslora": 1}, "use_rslora is 1; expected true or false"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules names 'lm_head'; served are"),
        ({"target_modules": ["down_proj", "v_proj"]}, "holds no v_proj, which target_modules"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as raised:
        read_adapter(write(tmp_path / "a", **changes), BASE, 64)
    assert str(tmp_path / "a") in str(raised.value)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva"])
def test_how_a_training_began_matters_only_where_it_changed_the_base(
    tmp_path: Path, init: object
) -> None:
    assert read_adapter(write(tmp_path / "a", init_lora_weights=init), BASE, 64).rank == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not valid JSON: .*; give a directory written by PEFT"),
        (b"[]", "is not a JSON object"),
        (b" " * (1 << 21), "has more than 1048576 bytes"),
    ],
)
def test_a_broken_config_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = write(tmp_path / "a")
    (path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=said):
        read_adapter(path, BASE, 64)


def test_two_tensors_of_one_place_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    name = f"{PREFIX}self_attn.q_proj.lora_A.weight"
    found = load_file(path / WEIGHTS_FILE)
    other = re.sub(r"layers\.(\d)", r"layers.0\1", name)
    save_file(found | {other: found[name]}, path / WEIGHTS_FILE)
    with pytest.raises(ModelError, match="have the same place"):
        read_adapter(path, BASE, 64)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{CONFIG_FILE} is missing; .*save_pretrained"):
        read_adapter(tmp_path / "none", BASE, 64)
    path = write(tmp_path / "a")
    whole = (path / WEIGHTS_FILE).read_bytes()
    (path / WEIGHTS_FILE).unlink()
    with pytest.raises(ModelError, match=rf"{WEIGHTS_FILE} is missing; .*save_pretrained"):
        read_adapter(path, BASE, 64)
    os.mkfifo(path / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=rf"{WEIGHTS_FILE} is not a regular file; "):
        read_adapter(path, BASE, 64)
    (path / WEIGHTS_FILE).unlink()
    for length in (0, 5, 60, len(whole) - 1):
        (path / WEIGHTS_FILE).write_bytes(whole[:length])
        with pytest.raises(ModelError, match="is not a valid safetensors file"):
            read_adapter(path, BASE, 64)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (f"{PREFIX}self_attn.q_proj.lora_magnitude_vector", (4,), "is not LoRA for q_proj"),
        ("base_model.model.lm_head.lora_A.weight", (2, 6), "is not LoRA for q_proj"),
        (f"{PREFIX}mlp.q_proj.lora_A.weight", (2, 6), "is not LoRA for q_proj"),
        (f"{PREFIX}self_attn.k_proj.lora_A.weight", (2, 6), "has no lora_B"),
        (f"{PREFIX}self_attn.k_proj.lora_A.weight", (6,), r"needs floats \[2, inputs\]"),
    ],
)
def test_tensors_without_a_place_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    path = write(tmp_path / "a")
    save_file(tensors() | {name: np.zeros(shape, np.float32)}, path / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=said):
        read_adapter(path, BASE, 64)


def test_keys_of_caches_keep_adapters_and_salts_apart() -> None:
    first, second = (bytes([number]) * 32 for number in (1, 2))
    keys = [cache_key(salt, one) for salt in (b"", b"s" * 16) for one in (b"", first, second)]
    assert len(set(keys)) == 6
    assert (keys[0], keys[3]) == (b"", b"s" * 16), "without an adapter the salt itself"


def test_marks_name_sets() -> None:
    first, second = (bytes([number]) * 32 for number in (1, 2))
    assert adapters_mark([]) == mark_of("weights:by=native") == ""
    assert adapters_mark([first, second]) == adapters_mark([second, first, second])
    marks = {adapters_mark(one) for one in ([first], [second], [first, second])}
    assert len(marks) == 3
    for mark in marks:
        assert mark_of(f"sha256:ab/weights:by=native{mark}") == mark


def test_configs_bound_names_and_numbers() -> None:
    with pytest.raises(msgspec.ValidationError, match="max_adapter_rank"):
        msgspec.convert({"max_adapter_rank": 0}, EngineConfig)
    with pytest.raises(ConfigError, match="'a:b', which is not an adapter name"):
        FleetConfig(adapters={"a:b": "/a"})
    with pytest.raises(ConfigError, match=r"set fleet\.adapters"):
        AdapterConfig("sql", "/a", "", "")


def test_a_folder_of_links_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    digest = read_adapter(path, BASE, 64).digest
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (linked / name).symlink_to(path / name)
    assert read_adapter(linked, BASE, 64).digest == digest
    shutil.rmtree(path)
    with pytest.raises(ModelError, match="is missing"):
        read_adapter(linked, BASE, 64)
