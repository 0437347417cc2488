"""Tests of checks of invalid models: `doctor` and `serve` report the same errors before a start."""

from __future__ import annotations

import json
import os
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.preflight.tensors import tensor_shapes
from ops.cli import main
from ops.cli.check_machine import FindingStatus
from ops.cli.check_places import check_model
from ops.cli.options import NAMED, as_typed
from ops.models.model_directory import demo_model_path
from ops.ports import claim_port
from store.model_dir.bounded import within_check_time
from tests.gguf_files import TINY, Kind, write_tiny
from triolet.config import EngineConfig, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "vocab_size": 8,
    "eos_token_id": 1,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": [8, 16],
    "model.norm.weight": [16],
    "lm_head.weight": [8, 16],
    LAYER + "input_layernorm.weight": [16],
    LAYER + "post_attention_layernorm.weight": [16],
    LAYER + "self_attn.q_proj.weight": [16, 16],
    LAYER + "self_attn.k_proj.weight": [8, 16],
    LAYER + "self_attn.v_proj.weight": [8, 16],
    LAYER + "self_attn.o_proj.weight": [16, 16],
    LAYER + "mlp.gate_proj.weight": [32, 16],
    LAYER + "mlp.up_proj.weight": [32, 16],
    LAYER + "mlp.down_proj.weight": [16, 32],
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def safetensors(shapes: dict[str, list[int]], dtype: str = "F32", item: int = 4) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + item * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(end)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small valid model with random weights."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_bytes((demo_model_path() / "tokenizer.json").read_bytes())
    (folder / WEIGHTS).write_bytes(safetensors(SHAPES))
    return folder


def config(**fields: Any) -> Callable[[Path], object]:  # noqa: ANN401 (any JSON)
    return lambda model: (model / "config.json").write_text(json.dumps(CONFIG | fields))


def weights(content: bytes) -> Callable[[Path], object]:
    return lambda model: (model / WEIGHTS).write_bytes(content)


def file(name: str, content: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(content)


def unreadable(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).mkdir()


WHOLE = safetensors(SHAPES)
BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("no directory", lambda model: model.rename(model.with_name("gone")), "does not exist"),
    ("no config", lambda model: (model / "config.json").unlink(), "config.json is missing"),
    ("half a config", file("config.json", "{"), "config.json is not valid JSON"),
    ("GPT-2", config(architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel' is not supported"),
    ("Gemma", config(architectures=["Gemma3ForCausalLM"]), "'Gemma3ForCausalLM' is not supp"),
    ("quantised", config(quantization_config={"bits": 4}), "quantised weights are not supported"),
    ("other shapes", config(hidden_size=32), "config.json requires floats"),
    ("pickles", file("pytorch_model.bin", ""), "files that can run code are refused"),
    ("no tokenizer", lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json is miss"),
    ("no real tokenizer", file("tokenizer.json", "{}"), "is not a tokenizer"),
    ("no end token", config(eos_token_id=None), "no end token"),
    ("no weights", lambda model: (model / WEIGHTS).unlink(), "no .safetensors file"),
    ("a pointer", weights(b"version https://git-lfs"), "is not a safetensors file, or is t"),
    ("empty weights", weights(b""), "is not a safetensors file, or is trunc"),
    ("truncated weights", weights(WHOLE[:-1]), "bytes of weights, its header says"),
    ("longer weights", weights(WHOLE + b"x"), "bytes of weights, its header says"),
    ("a list as header", weights(struct.pack("<Q", 2) + b"[]"), "broken header: not a JSON object"),
    ("no header", weights(struct.pack("<Q", 4) + b"{{{{"), "the header of "),
    ("unreadable weights", unreadable, "cannot be read: Is a directory; let this user read it"),
    (
        "integers",
        weights(safetensors(SHAPES, "I32")),
        "is I32 [8, 16]; config.json requires floats",
    ),
    ("a false size", weights(safetensors(SHAPES, "F16")), "is F16 [8, 16] in 512 bytes"),
    (
        "a missing tensor",
        weights(safetensors({name: SHAPES[name] for name in SHAPES if "up_proj" not in name})),
        f"tensor {LAYER}mlp.up_proj.weight is missing",
    ),
    (
        "an unknown tensor",
        weights(safetensors(SHAPES | {"score.weight": [2]})),
        "tensor score.weight has no place in a LlamaForCausalLM",
    ),
    ("no index", file(INDEX, "[]"), "holds JSON that is not an object"),
    ("an empty index", file(INDEX, "{}"), "has no weight_map"),
    (
        "an absent shard",
        file(INDEX, '{"weight_map": {"w": "model-00002-of-00002.safetensors"}}'),
        "model-00002-of-00002.safetensors is missing",
    ),
    (
        "a foreign shard",
        file(INDEX, '{"weight_map": {"w": "../x"}}'),
        "is not a plain *.safetensors",
    ),
]


def verdicts(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, str], str]:
    """Return the doctor's findings about the model, and the error line of `serve`."""
    port = ["--port", str(claim_port("127.0.0.1", 0))]
    assert main(["doctor", *arguments, *port, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (row,) = [row for row in findings if row["subject"] == "Model"]
    # Without templates, which would import torch in other processes only to be killed.
    assert main(["serve", *arguments, *port, "--set", "supervisor.templates=false"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return row, err.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_doctor_and_serve_refuse_a_model_in_the_same_words(
    model: Path,
    damage: Callable[[Path], object],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(model)
    row, line = verdicts(capsys, str(model))
    assert row["status"] == "fail"
    assert words in row["detail"] + "; " + row["remedy"]
    assert line == f"triolet: {row['detail']}; {row['remedy']}"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def of_type_99(path: Path) -> None:
    entry = b"token_embd.weight" + struct.pack("<I2Q", 2, 64, 256)
    content = path.read_bytes()
    assert entry in content
    at = content.index(entry) + len(entry)
    path.write_bytes(content[:at] + struct.pack("<I", 99) + content[at + 4 :])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, "is cut off: tensor "),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"version https://git-lfs"), "it is not a GGUF file"),
        (lambda path: path.unlink(), "does not exist; give the path of a GGUF file"),
        (of_type_99, "tensor token_embd.weight is of ggml type 99, which is not supported"),
        (
            lambda path: write_tiny(path, shapes={"blk.1.ffn_up.weight": None}),
            "tensor blk.1.ffn_up.weight is missing",
        ),
        (
            lambda path: write_tiny(path, shapes={"blk.0.attn_k.weight": (64, 64)}),
            "tensor blk.0.attn_k.weight is F32 [64, 64]; the metadata requires [32, 64]",
        ),
        (
            lambda path: write_tiny(path, shapes={"blk.0.ffn_gate_exps.weight": (64, 64)}),
            "tensor blk.0.ffn_gate_exps.weight has no place in a LlamaForCausalLM",
        ),
        (lambda path: write_tiny(path, **{"expert_count": 8}), "llama.expert_count is 8, which is"),
    ],
)
def test_doctor_and_serve_refuse_a_gguf_file_in_the_same_words(
    tmp_path: Path,
    damage: Callable[[Path], object],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_tiny(tmp_path / "tiny.gguf")
    damage(path)
    row, line = verdicts(capsys, str(path))
    assert words in row["detail"] + "; " + row["remedy"]
    assert row["remedy"]
    assert line == f"triolet: {row['detail']}; {row['remedy']}"


def test_the_doctor_accepts_a_gguf_file_and_fetches_no_known_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = write_tiny(tmp_path / "tiny.gguf", Kind.Q8_0)
    (found,), checked = check_model(path, EngineConfig())
    assert (found.status, checked is not None and checked.max_model_len) == (FindingStatus.OK, 512)
    assert checked is not None
    assert found.detail.startswith(f"{path}: LlamaForCausalLM, ")
    assert checked.weight_bytes == path.stat().st_size
    numbers = sum(map(prod, tensor_shapes(TINY).values()))
    assert checked.loaded_bytes < 1.1 * numbers, "as it is, a byte and a scale"
    _, widened = check_model(path, EngineConfig(weights=WeightFormat.DTYPE))
    assert widened is not None
    assert widened.loaded_bytes == 2 * numbers
    (missing,), _ = check_model(Path("smollm2"), EngineConfig())
    assert missing.status is FindingStatus.FAIL
    assert missing.remedy == "`triolet serve smollm2` downloads it"
    assert not (tmp_path / "data").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--max-model-len 257", "--max-model-len is 257; allowed: 1…256"),
        ("--kv-pool 1KiB", "--kv-pool is 1024, which is 1 blocks of 1024 bytes"),
        ("--kv-pool 8KiB --max-model-len 256", "or a smaller --max-model-len than 256"),
        ("--device tpu", "--device is 'tpu'; allowed: auto, cpu, cuda"),
        ("--backend xla", "--backend is 'xla'; allowed: auto"),
        ("--backend flash --device cpu", "--device is 'cpu'; allowed: cuda with --backend 'flash'"),
        ("--backend triton", "--device is 'auto', which chose 'cpu' because "),
    ],
)
def test_doctor_and_serve_refuse_settings_by_the_options_that_were_typed(
    model: Path, options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row, line = verdicts(capsys, str(model), *options.split())
    assert words in line
    assert line == f"triolet: {row['detail']}; {row['remedy']}"


@pytest.mark.slow
def test_a_gpu_that_no_process_may_see_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    row, line = verdicts(capsys, str(model), "--device", "cuda")
    assert "--device is 'cuda', but CUDA_VISIBLE_DEVICES is '' and hides" in row["detail"]
    assert row["detail"] in line


def test_what_the_system_refuses_to_read_is_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--port", "0", "x" * 300]) == 2
    assert "cannot be read: File name too long; let this user read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--set worker.speculation.source={}", "the draft model cannot be used: "),
        ("--tenants {}/nowhere.toml", "the tenants file cannot be read"),
        ("--tenants {}/config.json", "config.json"),
    ],
)
def test_other_files_are_read_before_a_start(
    model: Path, options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config(architectures=["GPT2LMHeadModel"])(model)
    assert main(["serve", "--port", "0", *options.format(model).split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in NAMED if "_" in NAMED[name].path[-1]])
def test_a_setting_with_an_option_is_called_as_it_is_typed(name: str) -> None:
    option, field = f"--{name.replace('_', '-')}", NAMED[name].path[-1]
    assert as_typed(f"{field} is 3; allowed: > {field}") == f"{option} is 3; allowed: > {option}"
    assert as_typed(f"/models/{field}/x is missing") == f"/models/{field}/x is missing"


@pytest.mark.parametrize("word", ["backend", "device", "dtype", "host", "port", "threads"])
def test_a_setting_that_is_a_common_word_is_called_so_where_it_is_meant(word: str) -> None:
    assert as_typed(f"{word} is 'x'; use {word} 'y'") == f"--{word} is 'x'; use --{word} 'y'"
    assert as_typed(f"the {word} is wrong") == f"the {word} is wrong"


def test_any_other_setting_is_called_by_its_path() -> None:
    assert as_typed("block_size is 3") == "worker.engine.block_size is 3"
    assert as_typed("weights is 'x'") == "worker.engine.weights is 'x'"
    assert as_typed("worker.engine.block_size is 3") == "worker.engine.block_size is 3"
    assert as_typed("drain_timeout_s is 3") == "drain_timeout_s is 3", "of server and workers"


READ = (
    *"config.json generation_config.json tokenizer.json tokenizer_config.json".split(),
    *"special_tokens_map.json chat_template.jinja chat_template.json page.json".split(),
    *"modules.json sentence_bert_config.json".split(),
    *(WEIGHTS, INDEX),
)
"""Every file of a model directory that is read before a start."""


@pytest.mark.parametrize("name", READ)
def test_no_file_of_a_model_is_waited_for_by_a_check_or_an_import(
    model: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    found, checked = check_model(model, EngineConfig())
    assert checked is None
    assert f"{model / name} is not a regular file" in [one.detail for one in found]
    assert main(["model", "import", str(model), "--name", "x", "--store", str(tmp_path / "s")]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in b %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{% if a %}" * 99 + "x" + "{% endif %}" * 99, "too many levels of indentation"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "maximum recursion depth exceeded"),
        ("{{ 1" + "+1" * 2_000 + " }}", "maximum recursion depth exceeded"),
        ("{{ " + "9" * 5000 + " }}", "Exceeds the limit"),
        ("{% for %}", "Expected an expression"),
        ("{{ x }}" * 20_000, "has 140000 bytes; allowed: up to 131072"),
    ],
    ids="blocks indentation parentheses sum digits syntax size".split(),
)
def test_a_template_that_cannot_be_compiled_is_named_with_its_file_before_a_start(
    model: Path, template: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file("tokenizer_config.json", json.dumps({"chat_template": template}))(model)
    (found,), _ = check_model(model, EngineConfig())
    assert found.status is FindingStatus.FAIL
    assert str(model / "tokenizer_config.json") in found.detail
    assert words in f"{found.detail}; {found.remedy}"
    assert main(["model", "import", str(model), "--name", "x", "--store", str(tmp_path / "s")]) == 2
    assert words in capsys.readouterr().err
    assert main(["serve", str(model), "--port", "0", "--set", "supervisor.templates=false"]) == 2
    assert words in capsys.readouterr().err
    (model / "chat_template.jinja").write_text(template)
    (found,), _ = check_model(model, EngineConfig())
    assert str(model / "chat_template.jinja") in found.detail


def test_a_model_of_a_thousand_million_layers_is_refused_by_the_number(model: Path) -> None:
    config(num_hidden_layers=10**9)(model)
    (found,), _ = check_model(model, EngineConfig())
    assert found.detail == f"{model / 'config.json'}: num_hidden_layers is 1000000000"
    assert found.remedy.startswith("allowed: 1 to 1000; ")


def test_every_fault_of_a_directory_is_told_and_each_once(model: Path) -> None:
    config(architectures=["GPT2LMHeadModel"])(model)
    (model / "tokenizer.json").unlink()
    file("chat_template.jinja", "{% for %}")(model)
    file("generation_config.json", '{"temperature": 9}')(model)
    file("page.json", '{"cards": 1}')(model)
    weights(b"version https://git-lfs")(model)
    found, checked = check_model(model, EngineConfig())
    assert checked is None
    details = [one.detail for one in found]
    for words in (
        "architecture 'GPT2LMHeadModel' is not supported",
        "tokenizer.json is missing",
        "chat_template.jinja: chat template 'default' is not valid jinja2",
        "temperature in ",
        "cards in ",
        "is not a safetensors file, or is truncated",
    ):
        assert len([one for one in details if words in one]) == 1, words
    assert len(details) == 6
    assert all(one.remedy and one.status is FindingStatus.FAIL for one in found)


def test_a_check_of_a_directory_ends_after_its_time(model: Path) -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return 4.0 * looks

    with within_check_time(clock):
        found, checked = check_model(model, EngineConfig())
    assert checked is None
    assert {one.detail.rpartition(": ")[2] for one in found} == {
        "checking its directory takes more than 10 s"
    }
