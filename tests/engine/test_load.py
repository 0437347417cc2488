"""Tests of `load_engine`: it returns a ready engine, or raises an error with the reason and a
remedy."""

from __future__ import annotations

import json
import platform
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from engine.device_thread import DeviceThread
from engine.load import load_engine
from engine.native.builds import BUILDS
from engine.native.library import load_build, load_library
from engine.preflight.check import dtype_for
from engine.weights import Checkpoint as WeightFiles
from triolet.config import Dtype, EngineConfig, WeightFormat
from triolet.errors import ConfigError
from triolet.units import KIB, MIB

from .driver import open_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .checkpoints import Checkpoint

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
"""Layers, K and V, tokens, heads, dimensions, bytes of the `llama` checkpoint in fp32."""


def refused(path: Path, **fields: Any) -> str:  # noqa: ANN401 (any field of EngineConfig)
    with pytest.raises(ConfigError) as caught:
        open_engine(path, EngineConfig(**fields))
    return str(caught.value)


def test_loading_reports_its_stages_in_order(checkpoint: Callable[[str], Checkpoint]) -> None:
    reports: list[tuple[str, float]] = []
    config = EngineConfig(kv_pool_bytes=10 * BLOCK_BYTES + 1)
    engine = load_engine(checkpoint("llama").path, config, lambda *report: reports.append(report))
    stages = list(dict.fromkeys(stage for stage, _ in reports))
    assert stages == ["config", "digest", "kv_pool", "weights", "warm_up"]
    assert [share for stage, share in reports if stage == "weights"] == [0.5, 1.0]
    assert reports[-1] == ("warm_up", 1.0)
    assert engine.pool.bytes_per_block == BLOCK_BYTES
    assert engine.pool.num_blocks == 10
    assert engine.eos_token_ids == (2,)
    assert engine.model_config.vocab_size == 256
    engine.ledger.check_invariants()
    assert engine.ledger.free_blocks == engine.ledger.total_blocks == 9


def test_the_length_is_what_model_and_pool_allow(checkpoint: Callable[[str], Checkpoint]) -> None:
    path = checkpoint("llama").path
    whole = open_engine(path, EngineConfig(kv_pool_bytes=33 * BLOCK_BYTES))
    assert (whole.max_model_len, whole.max_model_len_reason) == (
        512,
        "the model's max_position_embeddings of 512",
    )
    small = open_engine(path, EngineConfig(kv_pool_bytes=9 * BLOCK_BYTES))
    assert small.max_model_len == 128
    assert "kv_pool_bytes of" in small.max_model_len_reason
    assert "allows 512" in small.max_model_len_reason
    asked = open_engine(path, EngineConfig(kv_pool_bytes=9 * BLOCK_BYTES, max_model_len=100))
    assert (asked.max_model_len, asked.max_model_len_reason) == (100, "the setting max_model_len")
    shortest = open_engine(path, EngineConfig(kv_pool_bytes=2 * BLOCK_BYTES, max_model_len=1))
    assert shortest.max_model_len == 1
    one_token = EngineConfig(kv_pool_bytes=2 * BLOCK_BYTES // 16, block_size=1)
    assert open_engine(path, one_token).max_model_len == 1


def test_settings_that_cannot_work_name_field_value_and_remedy(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    path = checkpoint("llama").path
    assert refused(path, kv_pool_bytes=1 * KIB) == (
        f"kv_pool_bytes is 1024, which is 0 blocks of {BLOCK_BYTES} bytes; "
        f"allowed: at least {2 * BLOCK_BYTES}"
    )
    assert refused(path, kv_pool_bytes=9 * BLOCK_BYTES, max_model_len=200) == (
        f"kv_pool_bytes is {9 * BLOCK_BYTES}, which is 9 blocks of {BLOCK_BYTES} bytes; "
        f"allowed: at least {14 * BLOCK_BYTES}, or a smaller max_model_len than 200"
    )
    assert refused(path, max_model_len=513) == (
        "max_model_len is 513; allowed: 1…512 (the model's max_position_embeddings of 512)"
    )
    assert "kv_pool_bytes is" in refused(path, kv_pool_bytes=2**50)
    assert "device is 'quantum'; allowed: 'cpu', 'cuda'" in refused(path, device="quantum")
    assert "backend is 'xla'; allowed: auto, flash, native, sdpa" in refused(path, backend="xla")
    refusal = refused(path, backend="flash", device="cpu")
    assert "device is 'cpu'; allowed: cuda with backend 'flash'" in refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named(checkpoint: Callable[[str], Checkpoint]) -> None:
    assert "torch sees no NVIDIA GPU here; use device 'cpu'" in refused(
        checkpoint("llama").path, device="cuda"
    )


async def test_a_gpu_is_the_current_one_of_the_thread_that_computes(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = []

    def set_device(index: int) -> None:
        bound.append((index, threading.current_thread().name))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def refuse(layout: object, num_blocks: int, device: torch.device, pinned_bytes: int) -> None:
        raise ConfigError(f"no pool on {device}")

    monkeypatch.setattr("engine.load.KVPool", refuse)
    path = checkpoint("llama").path
    async with DeviceThread(max_waiting=1, num_threads=None, close_timeout_s=5.0) as device:
        for name in ("cuda:1", "cuda"):
            config = EngineConfig(device=name, kv_pool_bytes=1 * MIB)
            with pytest.raises(ConfigError, match=f"no pool on cuda:{int(name == 'cuda:1')}"):
                await device.run(load_engine, path, config, lambda *_: None)
        with pytest.raises(ConfigError, match="device is 'cuda:2'; allowed: cuda:0 to cuda:1"):
            await device.run(load_engine, path, EngineConfig(device="cuda:2"), lambda *_: None)
    assert bound == [(1, "device"), (0, "device")]


@pytest.mark.parametrize(
    ("chosen", "stored", "dtype"),
    [
        (Dtype.AUTO, torch.bfloat16, Dtype.BFLOAT16),
        (Dtype.AUTO, torch.float16, Dtype.BFLOAT16),
        (Dtype.AUTO, torch.float32, Dtype.FLOAT32),
        (Dtype.FLOAT32, torch.bfloat16, Dtype.FLOAT32),
        (Dtype.BFLOAT16, torch.float32, Dtype.BFLOAT16),
    ],
)
def test_a_model_is_computed_in_the_dtype_of_its_checkpoint(
    tmp_path: Path, chosen: Dtype, stored: torch.dtype, dtype: Dtype
) -> None:
    tensors = {"a": torch.zeros(2, dtype=stored), "b": torch.zeros(2, dtype=stored)}
    save_file(tensors | {"bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    weights = WeightFiles(tmp_path)
    assert dtype_for(EngineConfig(dtype=chosen), weights.dtype) is dtype


def test_fingerprints_tell_apart_what_must_not_exchange_kv(
    checkpoint: Callable[[str], Checkpoint], quantised: Path, tmp_path: Path
) -> None:
    path = checkpoint("llama").path

    def fingerprint(path: Path, **fields: Any) -> str:  # noqa: ANN401 (any field of EngineConfig)
        return open_engine(path, EngineConfig(**{"kv_pool_bytes": 1 * MIB, **fields})).fingerprint

    other_rope = shutil.copytree(path, tmp_path / "rope")
    config = json.loads((other_rope / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (other_rope / "config.json").write_text(json.dumps(config))
    prints = {
        fingerprint(path),
        fingerprint(path, dtype=Dtype.BFLOAT16),
        fingerprint(path, block_size=32),
        fingerprint(checkpoint("llama3-tied").path),
        fingerprint(other_rope),
        fingerprint(path, backend="sdpa"),
        *(fingerprint(quantised, weights=weights) for weights in WeightFormat),
    }
    assert len(prints) == (8 if load_library() else 6)
    assert fingerprint(path, weights=WeightFormat.DTYPE) in prints, "no weight is quantised"
    copied = shutil.copytree(path, tmp_path / "copy")
    assert fingerprint(copied, kv_pool_bytes=2 * MIB, max_model_len=64) in prints
    assert "layers=2:kv_heads=2:head_dim=16:block_size=16" in fingerprint(copied)


def test_whose_bits_are_equal_has_one_fingerprint_and_nobody_else(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("llama").path

    def fingerprint(backend: str) -> str:
        return open_engine(path, EngineConfig(backend=backend, kv_pool_bytes=1 * MIB)).fingerprint

    assert f":by=sdpa,torch-{torch.__version__}," in fingerprint("sdpa")
    assert fingerprint("sdpa").endswith("-1-threads")
    monkeypatch.setattr("engine.arithmetic._CPUINFO", path / "nowhere")
    assert fingerprint("sdpa").endswith(f"{platform.machine()}-1-threads")
    builds = [loaded for build in BUILDS if (loaded := load_build(build)) is not None]
    prints = set()
    for build in builds:
        monkeypatch.setattr("engine.backend.load_library", lambda build=build: build)
        torch.set_num_threads(1 + len(prints))
        prints.add(fingerprint("native"))
    torch.set_num_threads(1)
    assert len(prints) == bool(builds)
    assert all(":by=native-" in name for name in prints)
    monkeypatch.setattr(torch.Tensor, "exp", torch.Tensor.expm1)  # another machine's torch
    assert not builds or fingerprint("native") not in prints


def test_freed_blocks_are_poisoned_where_that_is_asked_for(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    path = checkpoint("llama").path
    usual = open_engine(path)
    assert usual.ledger.num_spoiled is None
    poisoned = open_engine(path, EngineConfig(kv_pool_bytes=1 * MIB, poison_freed_blocks=True))
    assert poisoned.ledger.num_spoiled == 0, "the warm-up's blocks too"
    poisoned.pool.blocks[1] = 0.0
    assert poisoned.ledger.num_spoiled == 1
