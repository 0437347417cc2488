"""Tests of products with quantised weights: every build of the C kernels has the bits of a plain C
implementation."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers import Blocks
from engine.native.builds import BUILDS
from engine.native.library import load_build
from engine.native.packing import Packed, pack_blocks
from engine.native.structs import LinearFields
from store.gguf.directory import gguf_directory
from tests.gguf_files import COMPUTED, QUANTISED, random_blocks, write_quantised
from triolet.config import Dtype, EngineConfig, WeightFormat
from triolet.errors import ModelError
from triolet.units import MIB

from .driver import GREEDY, Running, generate, open_engine, prefill
from .sanitizing import compile_with, compiler
from .test_exactness import teacher_forced

if TYPE_CHECKING:
    from pathlib import Path

    from engine.native.library import Library

LIBRARIES = [loaded for build in BUILDS if (loaded := load_build(build)) is not None]
PROMPTS = [np.random.default_rng(6).integers(3, 250, size=n).tolist() for n in (1, 17, 63, 200)]
LOGITS_ERROR = 0.05
"""Root mean square of what rounded activations change, as a share of the logits' spread."""

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="the kernels are not built for this machine")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the products in plain C."""
    if compiler() is None:
        pytest.skip("no C compiler")
    from pathlib import Path

    path = tmp_path_factory.mktemp("oracle") / "oracle.so"
    said = compile_with(("-shared", "-fPIC"), Path(__file__).parent / "oracle.c", path)
    assert said == ""
    return ctypes.CDLL(str(path))


def blocks_of(kind: Kind, outputs: int, inputs: int, seed: int) -> Blocks:
    rows = random_blocks(kind, outputs, inputs, np.random.RandomState(seed))
    return Blocks("x.gguf: tensor y", int(kind), inputs, rows)


def fields_of(packed: Packed) -> LinearFields:
    assert packed.strips is not None
    strips = packed.strips.data_ptr()
    return LinearFields(packed.weight.data_ptr(), strips, None, packed.panels, packed.steps)


def product(
    library: Library, packed: Packed, given_rows: torch.Tensor, *, is_bf16: bool, threads: int
) -> np.ndarray:
    """Return the complete panels of a product in a model of either dtype."""
    output = torch.empty(len(given_rows), packed.panels * library.panel)
    room = torch.empty(packed.steps * 8 * len(given_rows), dtype=torch.uint8)
    addresses = (given_rows.data_ptr(), room.data_ptr(), output.data_ptr())
    library.product(is_bf16, fields_of(packed), len(given_rows), addresses, threads)
    return output.numpy()


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(list(COMPUTED)), min_size=1, max_size=3),
    outputs=st.integers(1, 70),
    num_blocks=st.integers(1, 3),
    rows=st.integers(1, 140),
    threads=st.integers(1, 3),
    is_bf16=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_have_the_bits_of_plain_c_in_every_build_for_any_rows_and_threads(
    oracle: ctypes.CDLL,
    kinds: list[Kind],
    outputs: int,
    num_blocks: int,
    rows: int,
    threads: int,
    is_bf16: bool,
    seed: int,
) -> None:
    inputs = 256 * num_blocks
    counts = [16 * (1 + place) for place in range(len(kinds) - 1)] + [outputs]
    parts = [blocks_of(kind, n, inputs, seed) for kind, n in zip(kinds, counts, strict=True)]
    numbers = np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)
    numbers[:, :32] *= 1e-33  # too small to be divided by
    numbers[rows // 2, 64:96] *= 1e20
    given_rows = torch.from_numpy(numbers)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    expected = []
    for part in parts:
        own = np.empty((rows, len(part.rows)), dtype=np.float32)
        oracle.oracle(
            *map(ctypes.c_int64, (part.form,)),
            ctypes.c_void_p(part.rows.ctypes.data),
            *map(ctypes.c_int64, (part.rows.shape[1], len(part.rows), inputs)),
            ctypes.c_void_p(numbers.ctypes.data),
            ctypes.c_int64(rows),
            ctypes.c_void_p(own.ctypes.data),
        )
        expected.append(own)
    wanted = np.concatenate(expected, axis=1)
    for library in LIBRARIES:
        packed = pack_blocks(library, parts, dtype, num_threads=threads)
        found = product(library, packed, given_rows, is_bf16=is_bf16, threads=threads)
        assert np.array_equal(found[:, : wanted.shape[1]], wanted)
        assert not found[:, wanted.shape[1] :].any(), "outputs that are none"


@pytest.mark.parametrize("kind", COMPUTED, ids=lambda kind: kind.name)
def test_weights_are_those_that_the_format_defines(library: Library, kind: Kind) -> None:
    blocks = blocks_of(kind, 40, 768, seed=3)
    blocks.rows[5, :] = random_blocks(kind, 1, 768, np.random.RandomState(4))
    packed = pack_blocks(library, [blocks], torch.float32)
    expected = dequantize(blocks.rows, kind)
    found = np.empty_like(expected)
    for output in range(len(found)):
        library.weights(fields_of(packed), 768, output, found[output].ctypes.data)
    assert np.array_equal(found, expected)
    assert packed.weight.nbytes <= 1.1 * blocks.rows.nbytes * -(-40 // library.panel) * (
        library.panel / 40
    ), "no more than in the file"


def test_gates_and_ups_take_turns_whatever_their_formats(library: Library) -> None:
    lanes = library.panel // 2
    gates, ups = blocks_of(Kind.Q4_0, lanes + 3, 256, 1), blocks_of(Kind.Q6_K, lanes + 3, 256, 2)
    packed = pack_blocks(library, [gates, ups], torch.float32, is_gate_up=True)
    found = np.empty((packed.panels * library.panel, 256), dtype=np.float32)
    for output in range(len(found)):
        library.weights(fields_of(packed), 256, output, found[output].ctypes.data)
    in_turns = found.reshape(2, 2, lanes, 256)
    for place, blocks in enumerate((gates, ups)):
        own = in_turns[:, place].reshape(2 * lanes, 256)
        assert np.array_equal(own[: lanes + 3], dequantize(blocks.rows, Kind(blocks.form)))
        assert not own[lanes + 3 :].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_tokens_depend_on_no_batch_chunk_thread_or_build(quantised: Path, dtype: Dtype) -> None:
    found = []
    for build in LIBRARIES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.backend.load_library", lambda build=build: build)
            engine = open_engine(quantised, EngineConfig(dtype=dtype, kv_pool_bytes=16 * MIB))
        assert ":weights=auto:" in engine.fingerprint
        alone = [generate(engine, [prompt], 8)[0] for prompt in PROMPTS]
        found.append(alone)
        many = PROMPTS * 4
        assert generate(engine, many, 8) == alone * 4
        for chunk in (1, 7, 64):
            assert generate(engine, PROMPTS, 8, chunk=chunk) == alone
        torch.set_num_threads(3)
        try:
            assert generate(engine, many, 8) == alone * 4
        finally:
            torch.set_num_threads(1)
        again = Running(engine, "again", PROMPTS[3] + [r.token_id for r in alone[3][:7]], 1)
        prefill(engine, again, GREEDY, 512)
        assert again.results == alone[3][7:], "decode and prefill"
    assert all(one == found[0] for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPUTED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_widened_weights_within_the_stated_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = gguf_directory(write_quantised(tmp_path / "model.gguf", [kind]))
    exact = teacher_forced(path, PROMPTS[3], torch.float32, "sdpa")
    ours = teacher_forced(path, PROMPTS[3], dtype, "native", WeightFormat.AUTO)
    error = float((ours - exact).square().mean().sqrt() / exact.std())
    assert 0 < error < LOGITS_ERROR


@pytest.mark.parametrize("kind", COMPUTED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_a_scale_that_is_not_finite_is_refused_with_file_and_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, bits: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_quantised(tmp_path / "model.gguf", [kind])
    rows = random_blocks(
        kind, QUANTISED.vocab_size, QUANTISED.hidden_size, np.random.RandomState(12)
    )
    content = bytearray(path.read_bytes())
    at = content.index(rows.tobytes()) + rows.shape[1]  # the second row of token_embd.weight
    at += 208 if kind is Kind.Q6_K else 0
    content[at : at + 2] = bits.to_bytes(2, "little")
    path.write_bytes(content)
    with pytest.raises(ModelError) as raised:
        open_engine(gguf_directory(path))
    assert str(raised.value) == (
        f"{path}: tensor token_embd.weight has 1 scales that are not finite; fetch the file again, "
        "or use another quantisation of the model"
    )
