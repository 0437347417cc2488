"""Tests of reading untrusted files: special files do not block, and no more than the bound is
read."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from store.gguf import container
from store.gguf.container import read_gguf
from store.model_dir import headers
from store.model_dir.bounded import (
    BOUNDS,
    CHECK_S,
    DOCUMENT,
    HEADER,
    MAX_TENSORS,
    RANGES,
    count_of,
    end_token_ids,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    within_check_time,
)
from store.model_dir.headers import read_header, read_headers
from tests.gguf_files import byte_vocabulary, finish, write_header
from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


class Seconds:
    """A clock that advances with each call."""

    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("a pipe", os.mkfifo, "is not a regular file; "),
    ("a device", lambda path: path.symlink_to("/dev/zero"), "is not a regular file; "),
    ("a directory", lambda path: path.mkdir(), "cannot be read: Is a directory; let this user"),
    ("a socket", unix_socket, "cannot be read: .*; let this user read it"),
    ("a link to nothing", lambda path: path.symlink_to("nowhere"), "is missing; "),
    ("endless", endless, "has more than 8388608 bytes"),
]


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in NO_FILES])
def test_what_is_no_file_of_a_fit_size_is_refused_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "config.json"
    make(path)
    for read in (read_bytes, read_text, read_json):
        with pytest.raises(ModelError, match=f"config.json {words}"):
            read(path)


def test_a_link_to_a_file_is_read_and_a_file_of_the_most_bytes_too(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"a": 1}')
    link = tmp_path / "config.json"
    link.symlink_to(tmp_path / "blob")
    assert read_json(link) == {"a": 1}
    assert read_bytes(link, most=8) == b'{"a": 1}'
    with pytest.raises(ModelError, match=r"has more than 7 bytes, the most for such a file; "):
        read_bytes(link, most=7)
    assert read_json(tmp_path / "none", is_optional=True) == {}


def test_a_file_whose_size_the_system_does_not_know_is_no_way_around_the_bound() -> None:
    # Files in /proc are regular files of size 0.
    with pytest.raises(ModelError, match="is not valid JSON"):
        read_json(Path("/proc/self/status"))


@pytest.mark.parametrize("content", [b"[[],[],[]]", b"[1,2,3,4]", b'[{"a":1},{}]'])
def test_json_of_too_many_values_is_refused_before_it_is_parsed(content: bytes) -> None:
    assert parse_json("it", content, 6) == json.loads(content)
    with pytest.raises(ModelError, match="it has more than 3 values"):
        parse_json("it", content, 3)
    with pytest.raises(ModelError, match="it has more than 3 values"):
        parse_json("it", content + b"no JSON", 3)


def test_the_bounds_hold_what_is_known_of_models() -> None:
    assert MAX_TENSORS >= 2 * 91_991  # DeepSeek V3, with its scales
    assert HEADER.num_values >= 8 * MAX_TENSORS
    assert HEADER.num_bytes >= 150 * MAX_TENSORS
    assert BOUNDS["tokenizer.json"].num_bytes >= 3 * 33_384_568  # Gemma 3
    assert BOUNDS["tokenizer.json"].num_values >= 2 * 2_000_000
    assert DOCUMENT.num_bytes >= 5 * 1_157_001
    assert RANGES["num_hidden_layers"] >= 5 * 126
    assert RANGES["max_position_embeddings"] >= 10 * 10_485_760


@pytest.mark.parametrize("name", RANGES)
def test_a_number_beyond_its_range_is_refused_by_file_field_value_and_range(
    tmp_path: Path, name: str
) -> None:
    path, most = tmp_path / "config.json", RANGES[name]
    for value in (1, most):
        assert count_of(path, {name: value}, name) == value
        assert count_of(path, {f"llama.{name}": value}, f"llama.{name}") == value
        assert count_of(path, {}, name, value) == value
    for wrong in (0, -1, most + 1, 10**4000, True, 1.0, "1", [1], None):
        with pytest.raises(ModelError, match=rf"config\.json: {name} is .*; allowed: 1 to {most}"):
            count_of(path, {name: wrong}, name)


@pytest.mark.parametrize("wrong", [-1, 1 << 22, True, 1.5, "x", [1, None], {}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, wrong: object) -> None:
    path = tmp_path / "config.json"
    assert end_token_ids(path, {"eos_token_id": [0, 7]}) == (0, 7)
    with pytest.raises(ModelError, match="must be a token id or a list, each from 0 to 4194303"):
        end_token_ids(path, {"eos_token_id": wrong})


def test_a_check_opens_no_file_after_its_time_and_an_inner_check_gets_no_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with within_check_time(Seconds(step_s=1.0)):
        for _ in range(int(CHECK_S)):
            assert read_json(path) == {}
        with (
            within_check_time(Seconds(step_s=0.0)),
            pytest.raises(ModelError, match=r"config\.json was not read: .* more than 10 s; copy"),
        ):
            read_json(path)
    assert read_json(path) == {}, "no check is under way"
    with within_check_time(lambda: 1e9):
        assert read_json(path) == {}


def header_of(tensors: dict[str, Any]) -> bytes:
    encoded = json.dumps(tensors).encode()
    return len(encoded).to_bytes(8, "little") + encoded


def test_more_tensors_than_models_have_are_refused_in_one_file_and_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "MAX_TENSORS", 3)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_bytes(header_of({f"{number}.{name}": empty for name in range(2)}))
        assert len(read_header(path)) == 2
    words = r"safetensors: the number of tensors is 4; allowed: up to 3; "
    with pytest.raises(ModelError, match=f"1.{words}"):
        read_headers(paths)
    paths[0].write_bytes(header_of({str(name): empty for name in range(4)}))
    with pytest.raises(ModelError, match=f"0.{words}"):
        read_header(paths[0])


def test_a_header_of_very_many_empty_tensors_becomes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    one = b',"%06x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    content = b'{"a":0' + b"".join(one % number for number in range(280_000)) + b"}"
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ModelError, match=r"the header of .* has more than 1800000 values"):
        read_header(path)


def test_a_tensor_of_very_many_dimensions_is_refused_before_they_are_multiplied(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    tensor = {"dtype": "U8", "shape": [2**62] * 100_000, "data_offsets": [0, 0]}
    path.write_bytes(header_of({"a": tensor}))
    with pytest.raises(ModelError, match="tensor a: 100000 dimensions; allowed: up to 8"):
        read_header(path)


@pytest.mark.parametrize(
    ("bound", "most", "words"),
    [
        ("MAX_TENSORS", 0, r"1 tensors are announced at byte 8; allowed: up to 0"),
        ("MAX_KEYS", 5, r"\d+ keys of metadata are announced at byte 16; allowed: up to 5"),
        ("MAX_ELEMENTS", 9, r"256 elements of tokenizer\.ggml\.\w+ are announced .* up to 9"),
        ("MAX_METADATA_BYTES", 200, r"is cut off or broken: .* are left"),
    ],
)
def test_a_gguf_file_that_announces_more_than_models_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int, words: str
) -> None:
    path = tmp_path / "tiny.gguf"
    writer = write_header(path, byte_vocabulary())
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    finish(writer)
    assert len(read_gguf(path).tensors) == 1
    monkeypatch.setattr(container, bound, most)
    with pytest.raises(ModelError, match=words):
        read_gguf(path)


def test_a_pipe_in_place_of_a_gguf_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(
        ModelError, match=r"model\.gguf is not a regular file; fetch the file again"
    ):
        read_gguf(tmp_path / "model.gguf")
