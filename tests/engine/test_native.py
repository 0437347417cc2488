"""Tests of the C kernels, in every build that this machine can run."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from ctypes import Structure
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.backend import ADVANTAGES, build_model, choose_backend, kernels_report
from engine.batch import StepRow, flatten
from engine.kv_pool import KVLayout, KVPool
from engine.model_config import load_model_config
from engine.native import library as library_module
from engine.native.builds import BUILDS
from engine.native.library import Library, load_build
from engine.native.model import plan_tasks
from engine.native.structs import (
    PARTS,
    AdaptedFields,
    GroupFields,
    GroupPackingFields,
    LayerAdapterFields,
    LayerFields,
    LinearFields,
    LowRankFields,
    ModelFields,
    PackingFields,
    StepFields,
)
from engine.weights import Checkpoint as WeightFiles
from tests import forked
from triolet.config import Dtype, EngineConfig, WeightFormat
from triolet.errors import ConfigError
from triolet.units import MIB

from .checkpoints import FAMILIES, VOCAB_SIZE
from .driver import GREEDY, Running, decode, exported, generate, open_engine, prefill
from .kernels import attention_of_one

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from engine.batch import FlatStep

    from .checkpoints import Checkpoint

SOURCES = Path(library_module.__file__).parent / "source"
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
LAYER = 1
SCRIPT_S = 60.0
PROMPT = np.random.default_rng(8).integers(3, VOCAB_SIZE, size=200).tolist()


def mixed_rows(block_size: int) -> list[StepRow]:
    """Return decode rows and chunks over scattered blocks."""
    free = iter(torch.randperm(299).add(1).tolist())
    rows = []
    for num_tokens, start in [(1, 0), (1, 90), (70, 0), (1, 255), (33, 600), (3, 256), (1, 63)]:
        blocks = [next(free) for _ in range(-(-(start + num_tokens) // block_size))]
        rows.append(StepRow([0] * num_tokens, start, blocks, is_decode=num_tokens == 1))
    return rows


def attend(library: Library, pool: KVPool, step: FlatStep, queries: Tensor) -> Tensor:
    """Run attention alone over a layer of a pool."""
    layout = pool.layout
    model = ModelFields(
        is_bf16=layout.dtype is torch.bfloat16,
        num_layers=layout.num_layers,
        num_heads=queries.shape[1],
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        layers=(LayerFields * layout.num_layers)(),
        pool=pool.blocks.data_ptr(),
    )
    group = queries.shape[1] // layout.num_kv_heads
    tables, tasks = plan_tasks(step, max(1, library.rows_per_task // group))
    room = torch.empty(library.workspace_bytes(model, 1, 1) + 64, dtype=torch.uint8)
    fields = StepFields(
        num_tasks=len(tasks),
        task_tokens=int(tasks[:, 2].max()),
        tables=tables.ctypes.data,
        tasks=tasks.ctypes.data,
        workspace=room.data_ptr(),
    )
    output = torch.empty_like(queries)
    library.attend(model, fields, LAYER, queries.data_ptr(), output.data_ptr())
    return output


def filled_pool(
    dtype: torch.dtype, block_size: int, num_kv_heads: int, head_dim: int, rows: list[StepRow]
) -> KVPool:
    """Return a pool with random numbers in these rows' tokens and NaN everywhere else."""
    pool = KVPool(KVLayout(2, block_size, num_kv_heads, head_dim, dtype), 300, CPU)
    pool.poison(range(300))
    for row in rows:
        for position in range(row.start + len(row.token_ids)):
            block, offset = row.block_table[position // block_size], position % block_size
            pool.blocks[block, LAYER, :, offset].normal_()
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim"),
    [(16, 4, 2, 64), (7, 3, 3, 16), (64, 6, 1, 80), (16, 16, 2, 128)],
)
def test_attention_is_explicit_attention_and_reads_nothing_beyond(
    library: Library,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    torch.manual_seed(3)
    rows = mixed_rows(block_size)
    pool = filled_pool(dtype, block_size, num_kv_heads, head_dim, rows)
    step = flatten(rows, block_size)
    scale = head_dim**-0.5
    queries = (torch.randn(step.query_start_loc[-1], num_heads, head_dim) * scale).to(dtype)
    output = attend(library, pool, step, queries)
    for index, row in enumerate(rows):
        own = slice(*step.query_start_loc[index : index + 2])
        end = row.start + len(row.token_ids)
        cached = pool.blocks[list(step.block_tables[index]), LAYER].float()
        keys, values = cached.transpose(0, 1).flatten(1, 2)[:, :end]
        expected = attention_of_one(queries[own].float(), keys, values, 1.0)
        # In bf16 the weights are rounded, by 2^-9 of each, and so is the result.
        allowed = 2e-6 if dtype is torch.float32 else 2**-8 * float(values.abs().max())
        torch.testing.assert_close(output[own].float(), expected, rtol=0, atol=allowed)


# With wide heads, up to six query heads per key head take another code path than more do.
@pytest.mark.parametrize(
    ("num_heads", "head_dim"), [(8, 64), (2, 64), (6, 128), (12, 64), (14, 64), (4, 192), (8, 80)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_token_has_the_same_bits_in_every_company(
    library: Library, dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    torch.manual_seed(4)
    blocks = list(range(20, 0, -1))
    whole = [StepRow([0] * 300, 0, blocks)]
    pool = filled_pool(dtype, 16, 2, head_dim, whole)
    queries = (torch.randn(300, num_heads, head_dim) / 8).to(dtype)
    together = attend(library, pool, flatten(whole, 16), queries)
    alone = [
        attend(library, pool, flatten([StepRow([0], at, blocks)], 16), queries[at : at + 1])
        for at in (0, 1, 62, 63, 64, 65, 127, 128, 298, 299)
    ]
    expected = together[[0, 1, 62, 63, 64, 65, 127, 128, 298, 299]]
    assert torch.equal(torch.cat(alone), expected)
    parts = [
        attend(library, pool, flatten([StepRow([0] * (end - at), at, blocks)], 16), queries[at:end])
        for at, end in ((0, 7), (7, 100), (100, 165), (165, 300))
    ]
    assert torch.equal(torch.cat(parts), together)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_build_gives_the_logits_of_torch(
    checkpoint: Callable[[str], Checkpoint],
    library: Library,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.backend.load_library", lambda: library)
    model = checkpoint(family)
    logits = {}
    for backend in ("native", "sdpa"):
        engine = open_engine(model.path, EngineConfig(backend=backend, kv_pool_bytes=4 * MIB))
        [results] = generate(engine, [PROMPT], 12)
        logits[backend] = results
    for ours, expected in zip(logits["native"], logits["sdpa"], strict=True):
        assert ours.token_id == expected.token_id
        assert [i for i, _ in ours.top[:3]] == [i for i, _ in expected.top[:3]]
        np.testing.assert_allclose(
            [p for _, p in ours.top], [p for _, p in expected.top], atol=2e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(Dtype))
def test_decode_and_prefill_of_the_same_token_agree_bit_for_bit(
    checkpoint: Callable[[str], Checkpoint], library: Library, dtype: Dtype
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.backend.load_library", lambda: library)
        config = EngineConfig(dtype=dtype, backend="native", kv_pool_bytes=4 * MIB)
        engine = open_engine(checkpoint("qwen3").path, config)
    sequence = Running(engine, "decoded", PROMPT, 40)
    prefill(engine, sequence, GREEDY, 64)
    decode(engine, [sequence], GREEDY, 40)
    again = Running(engine, "prefilled", PROMPT + sequence.output_ids[:39], 1)
    prefill(engine, again, GREEDY, 512)
    assert again.results == sequence.results[39:]
    # Prefill of the completion's tokens gives what decode wrote, also in the KV.
    num_whole = len(again.prompt) // 16
    first, second = (
        bytes(exported(engine.pool, blocks[:num_whole]))
        for blocks in (again.blocks, sequence.blocks)
    )
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("weights", list(WeightFormat))
def test_every_build_gives_the_same_bits(
    checkpoint: Callable[[str], Checkpoint], quantised: Path, dtype: Dtype, weights: WeightFormat
) -> None:
    builds = [loaded for build in BUILDS if (loaded := load_build(build)) is not None]
    if len(builds) < 2:
        pytest.skip("fewer than two builds for this machine")
    config = EngineConfig(dtype=dtype, weights=weights, backend="native", kv_pool_bytes=4 * MIB)
    results, stored = [], []
    for build in builds:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.backend.load_library", lambda build=build: build)
            path = quantised if weights is WeightFormat.AUTO else checkpoint("qwen3").path
            engine = open_engine(path, config)
        sequences = [Running(engine, index, PROMPT[index:], 20) for index in range(5)]
        for sequence in sequences:
            prefill(engine, sequence, GREEDY, 64)
        decode(engine, sequences, GREEDY, 20)
        results.append([sequence.results for sequence in sequences])
        stored.append(bytes(engine.pool.export_blocks(sequences[0].blocks)))
    assert all(result == results[0] for result in results)
    assert all(kv == stored[0] for kv in stored)


def declared(name: str) -> list[str]:
    """Return the fields of a C structure as model.h declares them."""
    text = (SOURCES / "model.h").read_text().partition("#define")[2]
    body = next(part.rpartition("typedef struct {")[2] for part in text.split(f"}} {name};")[:1])
    lines = [line.split("/*")[0].strip() for line in body.splitlines()]
    return [line.rstrip(";").split()[-1].lstrip("*") for line in lines if line.endswith(";")]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Linear", LinearFields),
        ("LowRank", LowRankFields),
        ("LayerAdapter", LayerAdapterFields),
        ("Group", GroupFields),
        ("Adapted", AdaptedFields),
        ("Layer", LayerFields),
        ("Model", ModelFields),
        ("Step", StepFields),
        ("Packing", PackingFields),
        ("GroupPacking", GroupPackingFields),
    ],
)
def test_structures_mirror_the_header(name: str, fields: type[Structure]) -> None:
    mirrored = [entry[0] for entry in fields._fields_]
    assert mirrored == declared(name)
    assert ctypes.sizeof(fields) % 8 == 0


def test_the_limits_of_the_machine_are_numbers(library: Library) -> None:
    memory = torch.ones(1 << 18)
    for num_threads in (1, 2):
        assert library.read_speed(memory.data_ptr(), memory.nbytes, num_threads) > 0
        for is_bf16 in (False, True):
            assert library.product_speed(is_bf16, 10, num_threads) > 0


def test_parts_of_a_step_are_numbered_as_in_the_header() -> None:
    [listed] = re.findall(r"enum \{ (.*), NUM_PARTS \}", (SOURCES / "model.h").read_text())
    assert tuple(name.strip().removeprefix("PART_").lower() for name in listed.split(",")) == PARTS


def test_auto_takes_the_kernels_where_they_fit(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model_config(checkpoint("llama").path)
    if library_module.load_library() is not None:
        assert choose_backend(EngineConfig(), model, "cpu") == "native"
    assert choose_backend(EngineConfig(), model, "cuda") == "sdpa"
    assert choose_backend(EngineConfig(backend="sdpa"), model, "cpu") == "sdpa"
    with pytest.raises(ConfigError, match="device is 'cuda'; allowed: cpu with backend 'native'"):
        choose_backend(EngineConfig(backend="native"), model, "cuda")
    with pytest.raises(ConfigError, match="backend is 'xla'; allowed: auto, flash, native, sdpa"):
        choose_backend(EngineConfig(backend="xla"), model, "cpu")
    monkeypatch.setattr("engine.backend.load_library", lambda: None)
    assert choose_backend(EngineConfig(), model, "cpu") == "sdpa"
    with pytest.raises(ConfigError, match="kernels are not built for this machine"):
        choose_backend(EngineConfig(backend="native"), model, "cpu")


def test_a_build_that_is_not_installed_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library_module, "_FOLDER", tmp_path)
    assert [load_build(build) for build in BUILDS] == [None] * len(BUILDS)
    library_module.load_library.cache_clear()
    assert library_module.load_library() is None
    library_module.load_library.cache_clear()
    suffix = EXTENSION_SUFFIXES[0]
    (tmp_path / f"_avx2{suffix}").write_bytes(b"not a library")
    assert load_build("avx2") is None


@pytest.mark.slow
def test_the_kernels_share_the_threads_of_torch() -> None:
    if library_module.load_library() is None:
        pytest.skip("the kernels are not built for this machine")
    script = (
        "import torch\n"
        "from engine.native.library import _loaded_runtimes, load_library\n"
        "assert load_library() is not None\n"
        "print(len(_loaded_runtimes()))\n"
    )
    with forked.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        said, _ = process.communicate(timeout=SCRIPT_S)
    assert process.returncode == 0
    assert said == b"1\n"


def test_loading_says_how_far_it_is(checkpoint: Callable[[str], Checkpoint], backend: str) -> None:
    path = checkpoint("llama").path
    config = load_model_config(path)
    pool = KVPool(KVLayout(2, 16, config.num_kv_heads, 16, torch.float32), 4, CPU)
    shares: list[float] = []
    build_model(backend, WeightFormat.DTYPE, config, WeightFiles(path), pool, 32, shares.append)
    assert shares == [0.5, 1.0]


def test_a_report_names_the_build_its_cores_and_what_it_lacks() -> None:
    assert list(ADVANTAGES) == list(BUILDS)
    build = next((build for build in BUILDS if load_build(build)), "none")
    report = kernels_report("sdpa" if build == "none" else "native")
    assert len(report["lacks"]) == [*BUILDS, "none"].index(build)
    counted = torch.get_num_threads(), len(os.sched_getaffinity(0))
    assert (report["build"], report["threads"], report["cores"]) == (build, *counted)


@pytest.mark.parametrize(("runs", "count"), [("avx512bf16", 0), ("avx512", 2), ("avx2", 4)])
def test_a_report_says_of_each_better_build_why_it_does_not_run(
    runs: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.backend.load_library", lambda: SimpleNamespace(build=runs))
    monkeypatch.setattr("engine.backend.library_path", lambda build: build == "avx512" or None)
    expected = [
        "the build for AVX-512 bf16 is not installed: bfloat16 is multiplied as float32",
        "the build for AVX-512 VNNI is not installed: quantised weights take more instructions",
        "this CPU has no AVX-512: a vector holds 8 numbers instead of 16",
        "the build for AVX-VNNI is not installed: quantised weights take more instructions",
    ]
    assert kernels_report("native")["lacks"] == expected[:count]
    assert "'sdpa'" in str(kernels_report("sdpa")["lacks"])
    monkeypatch.setattr("engine.backend.load_library", lambda: None)
    assert "torch computes, at half the speed" in str(kernels_report("sdpa")["lacks"])
