"""Tests of LoRA adapters in the engine: the same answers as merged weights, and no effect of one
row's adapter on the bits of other rows."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from engine.adapters.shapes import adapter_numbers
from engine.adapters.tensors import layers_of
from engine.attention.traits import check_backend
from engine.batch import StepRow
from engine.model_config import load_model_config
from engine.native.model import NativeModel
from engine.preflight.tensors import tensor_shapes
from store.adapter_files import WEIGHTS_FILE, read_adapter
from tests.adapters import Written, write_adapter, write_merged
from tests.gguf_files import QUANTISED
from triolet.adapter_keys import digest_bytes
from triolet.config import AdapterConfig, Dtype, EngineConfig
from triolet.errors import ConfigError, ModelError
from triolet.units import MIB

from .driver import GREEDY, Running, generate, ids, open_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from engine.batch import Sampled
    from engine.load import Engine

    from .checkpoints import Checkpoint

PROMPTS = [[5, 9, 200, 31], list(range(3, 70)), [77] * 17, list(range(200, 230))]
NUM_TOKENS = 12
ATTENTION = ("q_proj", "v_proj")


def config_of(backend: str, *adapters: Written, dtype: Dtype = Dtype.FLOAT32) -> EngineConfig:
    """Return the config of an engine with adapters, each named after its directory."""
    return EngineConfig(
        backend=backend,
        dtype=dtype,
        kv_pool_bytes=4 * MIB,
        adapters=tuple(told(one) for one in adapters),
    )


def told(adapter: Written) -> AdapterConfig:
    """Return the adapter's config for workers, for a base that is not in a store."""
    digest = read_adapter(adapter.path, "", 64).digest
    return AdapterConfig(adapter.path.name, str(adapter.path), "", digest)


def digest_of(adapter: Written) -> bytes:
    return digest_bytes(told(adapter).digest)


def generate_mixed(
    engine: Engine, asked: Sequence[tuple[Sequence[int], bytes]], chunk: int = 64
) -> list[list[Sampled]]:
    """Return completions of prompts with their adapters, computed together in each step."""
    sequences = [
        Running(engine, index, prompt, NUM_TOKENS) for index, (prompt, _) in enumerate(asked)
    ]
    done = [0] * len(asked)
    while any(len(one.results) < NUM_TOKENS for one in sequences):
        rows, of = [], []
        for index, (one, (prompt, adapter)) in enumerate(zip(sequences, asked, strict=True)):
            if len(one.results) == NUM_TOKENS:
                continue
            if one.results:
                token_ids, start = [one.output_ids[-1]], len(prompt) + len(one.results) - 1
            else:
                start = done[index]
                token_ids = list(prompt[start : start + chunk])
                done[index] += len(token_ids)
            is_last = bool(one.results) or done[index] == len(prompt)
            spec = one.spec(engine, GREEDY) if is_last else None
            is_decode = bool(one.results)
            rows.append(
                StepRow(token_ids, start, one.blocks, spec, is_decode=is_decode, adapter=adapter)
            )
            of.append(one)
        for one, sampled in zip(of, engine.runner.step(rows), strict=True):
            if sampled is not None:
                one.results.append(sampled)
    for index in range(len(asked)):
        engine.ledger.release(index)
    return [one.results for one in sequences]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-biases", "qwen3"])
@pytest.mark.parametrize("fields", [{}, {"use_rslora": True, "lora_alpha": 3}])
def test_an_adapter_answers_as_its_merged_weights_do(
    checkpoint: Callable[[str], Checkpoint],
    tmp_path: Path,
    family: str,
    fields: dict[str, object],
    backend: str,
) -> None:
    base = checkpoint(family).path
    adapter = write_adapter(tmp_path / "all", base, 1, rank=5, spread=0.2, **fields)
    merged = open_engine(write_merged(tmp_path / "merged", base, adapter), config_of(backend))
    engine = open_engine(base, config_of(backend, adapter))
    expected = generate(merged, PROMPTS, NUM_TOKENS)
    found = generate_mixed(engine, [(prompt, digest_of(adapter)) for prompt in PROMPTS])
    assert [ids(one) for one in found] == [ids(one) for one in expected]
    plain = generate(engine, PROMPTS, NUM_TOKENS)
    assert [ids(one) for one in plain] != [ids(one) for one in expected]


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_a_rows_bits_depend_on_no_other_rows_adapter(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, dtype: Dtype, backend: str
) -> None:
    base = checkpoint("llama").path
    whole = write_adapter(tmp_path / "whole", base, 1)
    part = write_adapter(tmp_path / "part", base, 2, ATTENTION, rank=17)
    engine = open_engine(base, config_of(backend, whole, part, dtype=dtype))
    without = open_engine(base, config_of(backend, dtype=dtype))
    kinds = [b"", digest_of(whole), digest_of(part)]
    asked = [(prompt, kind) for prompt in PROMPTS for kind in kinds]
    alone = [generate_mixed(engine, [one])[0] for one in asked]
    assert generate_mixed(engine, asked) == alone
    assert generate_mixed(engine, asked[::-1], chunk=16) == alone[::-1]
    for index in range(0, len(alone), len(kinds)):
        assert len({str(ids(one)) for one in alone[index : index + len(kinds)]}) == len(kinds)
    assert alone[:: len(kinds)] == [generate_mixed(without, [(p, b"")])[0] for p in PROMPTS]
    if isinstance(engine.runner.model, NativeModel):
        for engine.runner.model.num_threads in (2, 3):
            assert generate_mixed(engine, asked) == alone


@pytest.mark.usefixtures("kernels")
def test_both_backends_agree(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    base = checkpoint("qwen3").path
    adapters = [write_adapter(tmp_path / str(seed), base, seed) for seed in (1, 2)]
    asked = [(prompt, digest_of(one)) for prompt in PROMPTS for one in adapters]
    native, torch_path = (
        generate_mixed(open_engine(base, config_of(backend, *adapters)), asked)
        for backend in ("native", "sdpa")
    )
    assert [ids(one) for one in native] == [ids(one) for one in torch_path]


@pytest.mark.usefixtures("kernels")
def test_quantised_weights_take_adapters(quantised: Path, tmp_path: Path) -> None:
    base, shapes = quantised, tmp_path / "shapes"
    shapes.mkdir()
    save_file(
        {name: torch.zeros(shape) for name, shape in tensor_shapes(QUANTISED).items()},
        shapes / "model.safetensors",
    )
    adapter = write_adapter(tmp_path / "one", shapes, 1)
    config = config_of("native", adapter)
    engines = [
        open_engine(
            base,
            EngineConfig(
                backend="native",
                kv_pool_bytes=4 * MIB,
                adapters=adapters,
            ),
        )
        for adapters in (config.adapters, ())
    ]
    plain = [generate_mixed(engine, [(PROMPTS[1], b"")])[0] for engine in engines]
    assert plain[0] == plain[1]
    adapted = generate_mixed(engines[0], [(PROMPTS[1], digest_of(adapter)), (PROMPTS[1], b"")])
    assert adapted[1] == plain[0]
    assert ids(adapted[0]) != ids(plain[0])


def test_the_fingerprint_names_the_set_of_adapters(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    base = checkpoint("llama").path
    first = write_adapter(tmp_path / "first", base, 1)
    second = write_adapter(tmp_path / "second", base, 2)

    def fingerprint(*adapters: Written) -> str:
        return open_engine(base, config_of("auto", *adapters)).fingerprint

    assert fingerprint(first, second) == fingerprint(second, first)
    assert len({fingerprint(), fingerprint(first), fingerprint(second, first)}) == 3


def test_a_base_of_other_shapes_is_refused(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "one", checkpoint("llama").path, 1)
    with pytest.raises(ModelError, match=r"k_proj.lora_B.*give the adapter to the base"):
        open_engine(checkpoint("qwen3").path, config_of("auto", adapter))


def test_files_that_have_changed_are_refused(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    base = checkpoint("llama").path
    adapter = write_adapter(tmp_path / "one", base, 1)
    config = told(adapter)
    shutil.rmtree(adapter.path)
    write_adapter(adapter.path, base, 2)
    with pytest.raises(ModelError, match="its files have changed"):
        open_engine(base, EngineConfig(kv_pool_bytes=4 * MIB, adapters=(config,)))


def test_a_pipe_in_place_of_weights_is_not_waited_for_and_its_adapter_is_named(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    base = checkpoint("llama").path
    config = told(write_adapter(tmp_path / "one", base, 1))
    weights = tmp_path / "one" / WEIGHTS_FILE
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(ModelError, match=f"adapter {config.name}: .* is not a regular file"):
        adapter_numbers((config,), load_model_config(base))


@pytest.mark.usefixtures("kernels")
def test_the_memory_of_adapters_is_known_from_their_headers_and_taken_from_the_pools_share(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    base = checkpoint("llama").path
    adapters = [
        write_adapter(tmp_path / "whole", base, 1),
        write_adapter(tmp_path / "part", base, 2, (*ATTENTION, "up_proj"), rank=17),
    ]
    model, place = load_model_config(base), torch.device("cpu")
    loaded = [
        layers_of(read_adapter(one.path, "", 64), model, torch.float32, place) for one in adapters
    ]
    counted = sum(
        low.down.numel() + low.up.numel()
        for layers in loaded
        for layer in layers
        for low in layer.values()
    )
    config = config_of("native", *adapters)
    assert adapter_numbers(config.adapters, model) == counted
    scarce = replace(config, kv_pool_bytes=None, kv_pool_memory_share=1e-9)
    with pytest.raises(
        ConfigError, match=rf"without the {counted * 4} of adapters.*give fewer adapters, a"
    ):
        open_engine(base, scarce)


def test_numbers_are_those_of_the_digest_though_the_file_is_replaced(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    base = checkpoint("llama")
    first, second = (write_adapter(tmp_path / str(seed), base.path, seed) for seed in (1, 2))
    model, place = load_model_config(base.path), torch.device("cpu")
    before = layers_of(read_adapter(first.path, "", 64), model, torch.float32, place)
    read = read_adapter(first.path, "", 64)
    (second.path / WEIGHTS_FILE).replace(first.path / WEIGHTS_FILE)
    after = layers_of(read, model, torch.float32, place)
    for expected, found in zip(before, after, strict=True):
        assert found.keys() == expected.keys()
        for product, low in found.items():
            assert torch.equal(low.down, expected[product].down)
            assert torch.equal(low.up, expected[product].up)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, number: float
) -> None:
    base = checkpoint("llama").path
    adapter = write_adapter(tmp_path / "one", base, 1)
    name = min(adapter.tensors)
    adapter.tensors[name][1, 2] = number
    save_file(adapter.tensors, adapter.path / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=rf"tensor {name} has numbers that are not finite"):
        open_engine(base, config_of("sdpa", adapter))


def test_backends_without_adapters_refuse_them(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "sql", checkpoint("llama").path, 1)
    for backend in ("triton", "flash"):
        with pytest.raises(ConfigError, match=rf"'{backend}'.*\(sql\); use backend 'sdpa'"):
            check_backend(config_of(backend, adapter), Dtype.BFLOAT16, 64, "cuda")
    check_backend(config_of("sdpa", adapter), Dtype.BFLOAT16, 64, "cuda")
