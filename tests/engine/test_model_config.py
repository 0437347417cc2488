"""Tests of reading a model's config.json: both spellings of its fields are accepted, and
unsupported settings are refused with a remedy."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model_config import Biases, load_eos_token_ids, load_model_config
from engine.rope_config import RopeConfig, RopeKind
from triolet.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def write(directory: Path, fields: dict[str, Any], name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(fields))
    return directory


def test_defaults_are_those_of_the_architecture(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, LLAMA))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(theta=10_000.0, original_length=4096)
    assert config.biases == Biases()
    assert not config.is_tied
    assert not config.has_qk_norm
    assert config.max_model_len == 4096
    assert "max_position_embeddings of 4096" in config.max_model_len_reason


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5, original_length=4096)),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeConfig(5e5, original_length=4096),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}},
            RopeConfig(5e5, RopeKind.LLAMA3, 8.0, 512),
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "rope_type": "llama3"}},
            RopeConfig(5e5, RopeKind.LLAMA3, 8.0, 512),
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(1e4, RopeKind.LINEAR, 2.0, 4096),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            RopeConfig(1e4, RopeKind.YARN, 4.0, 4096, attention_factor=1.5),
        ),
        ({"rope_scaling": None}, RopeConfig(original_length=4096)),
    ],
)
def test_both_spellings_of_rope_are_read(
    tmp_path: Path, fields: dict[str, Any], expected: RopeConfig
) -> None:
    assert load_model_config(write(tmp_path, {**LLAMA, **fields})).rope == expected


@pytest.mark.parametrize(
    ("architecture", "fields", "max_model_len", "reason"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, 4096, "max_position_embeddings"),
        ("MistralForCausalLM", {"sliding_window": 8192}, 4096, "max_position_embeddings"),
        ("MistralForCausalLM", {"sliding_window": 1024}, 1024, "sliding_window of 1024"),
        ("LlamaForCausalLM", {"sliding_window": 1024}, 4096, "max_position_embeddings"),
        ("Qwen2ForCausalLM", {"sliding_window": 1024}, 4096, "max_position_embeddings"),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 1024, "use_sliding_window": True},
            1024,
            "sliding_window of 1024",
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 1024,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 2,
            },
            4096,
            "max_position_embeddings",
        ),
    ],
)
def test_a_sliding_window_limits_the_length(
    tmp_path: Path, architecture: str, fields: dict[str, Any], max_model_len: int, reason: str
) -> None:
    fields = {**LLAMA, **fields, "architectures": [architecture]}
    config = load_model_config(write(tmp_path, fields))
    assert config.max_model_len == max_model_len
    assert reason in config.max_model_len_reason


@pytest.mark.parametrize(
    ("architecture", "fields", "biases", "has_qk_norm"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, Biases(qkv=True, output=True), False),
        ("LlamaForCausalLM", {"mlp_bias": True}, Biases(mlp=True), False),
        ("MistralForCausalLM", {"attention_bias": True}, Biases(), False),
        ("Qwen2ForCausalLM", {}, Biases(qkv=True), False),
        ("Qwen3ForCausalLM", {}, Biases(), True),
        ("Qwen3ForCausalLM", {"attention_bias": True}, Biases(qkv=True, output=True), True),
    ],
)
def test_architectures_differ_in_biases_and_norms(
    tmp_path: Path, architecture: str, fields: dict[str, Any], biases: Biases, has_qk_norm: bool
) -> None:
    fields = {**LLAMA, **fields, "architectures": [architecture]}
    config = load_model_config(write(tmp_path, fields))
    assert (config.biases, config.has_qk_norm) == (biases, has_qk_norm)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map names code"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"hidden_size": None}, "hidden_size is None; allowed: 1 to 1048576; "),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope parameters: could not convert"),
        ({"rope_theta": -1.0}, "out of range"),
        ({"rope_parameters": {"full_attention": {}}}, "one set of parameters is supported"),
        ({"rope_scaling": ["yarn"]}, "one set of parameters is supported"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    write(tmp_path, {**LLAMA, **fields})
    with pytest.raises(ModelError) as caught:
        load_model_config(tmp_path)
    assert text in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


FIELDS = (
    *LLAMA,
    *"head_dim num_key_value_heads rope_theta rope_scaling rope_parameters hidden_act".split(),
    *"sliding_window layer_types attention_bias auto_map quantization_config".split(),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta"]), inner)
    ),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"]),
    st.dictionaries(st.sampled_from(FIELDS[1:]), VALUES, min_size=1, max_size=3),
)
def test_any_nonsense_is_a_clean_error(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    write(tmp_path, {**LLAMA, "architectures": [architecture], **fields})
    with contextlib.suppress(ModelError):
        config = load_model_config(tmp_path)
        assert config.max_model_len >= 1
        assert config.head_dim >= 1


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "config.json is missing; give the path of a complete"),
        (b"{", "config.json is not valid JSON: "),
        (b"[1]", "holds JSON that is not an object"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_broken_config_file_is_named(tmp_path: Path, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model_config(tmp_path)
    assert text in str(caught.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist; give the path of a directory"):
        load_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "data.pkl", "modeling_x.py"]
)
def test_a_directory_with_code_in_it_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=f"{name}: files that can run code are refused"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 9}, (5,)),
        ({"eos_token_id": [5, 7]}, {}, (5, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9,)),
        (None, {"eos_token_id": [3]}, (3,)),
        (None, {}, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    write(tmp_path, {**LLAMA, **config})
    if generation is not None:
        write(tmp_path, generation, "generation_config.json")
    assert load_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("value", ["</s>", [1, "x"], -1, 1.5, [True]])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: object) -> None:
    write(tmp_path, {"eos_token_id": value}, "generation_config.json")
    with pytest.raises(ModelError, match="must be a token id or a list"):
        load_eos_token_ids(tmp_path)
