"""Tests of the stages of a GPU lease: they fit into their time and always save results, and the
wheels to upload are checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from loadtest.bench.model import SHAPES
from loadtest.harness.streams import Stream
from tests.loadtest.wheels import write_wheel
from tools.gpu_lease import runs as gpu_runs
from tools.gpu_lease.lease import (
    MAX_LOG_BYTES,
    RefusedError,
    Results,
    main,
    parse,
    prepare,
    python_version,
    run_stages,
)
from tools.gpu_lease.pack import (
    MANIFEST,
    MAX_BYTES,
    ROOT,
    PackError,
    check_size,
    install,
    lacking,
    needs,
    read_manifest,
    unmet,
)
from tools.gpu_lease.stages import INSTALL_S, PART_S, PARTS, STAGES, STOP_S, Stage, refusal
from tools.gpu_lease.work import (
    IN_REHEARSAL,
    KNOWN,
    DummyCheckpoint,
    decode_ceiling,
    num_parameters,
    peaks_of,
    prefill_ceiling,
)

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 20.0
FIGURE = 'print(\'figure {"case": "a", "engine": "b", "value": 1.5, "unit": "s"}\', flush=True)'


def stage(name: str, most_s: float = DEADLINE_S) -> Stage:
    return Stage(name, 1, most_s, "a test", "figures")


def run(folder: Path, programs: dict[Stage, str], seconds: float = 100.0) -> tuple[int, list[Any]]:
    """Run Python programs as stages; return the exit code and the files on disk."""
    code = run_stages(
        list(programs),
        lambda one: [sys.executable, "-S", "-c", programs[one]],
        dict(os.environ),
        Results(folder, {"machine": "a test"}),
        time.monotonic() + seconds,
        lambda line: None,
    )
    return code, stages_in(folder)


def stages_in(folder: Path) -> list[Any]:
    stages: list[Any] = json.loads((folder / "results.json").read_text())["stages"]
    return stages


def test_each_part_fits_into_one_invocation_and_every_stage_is_there() -> None:
    for part in PARTS:
        stages_s = sum(one.most_s for one in STAGES if one.part == part)
        assert INSTALL_S + stages_s + STOP_S <= PART_S == 540
    assert {one.name for one in STAGES} == {
        name for name in gpu_runs.RUN if not name.startswith("warm-")
    }


def test_a_stage_begins_only_if_its_time_and_that_of_its_end_are_left() -> None:
    one = stage("one", 60.0)
    assert refusal(one, 540.0 - 60.0 - STOP_S, 540.0) is None
    assert refusal(one, 540.0 - 60.0 - STOP_S + 1, 540.0) == "74 s were left, and it may take 75"


def test_a_stage_without_time_is_skipped_and_the_exit_code_says_so(tmp_path: Path) -> None:
    code, [first] = run(tmp_path, {stage("first", 50.0): "pass"}, seconds=40.0)
    assert code == 1
    assert first["state"] == "skipped"
    assert "s were left, and it may take 65" in first["reason"]


def test_the_time_of_a_run_is_that_of_its_parts() -> None:
    asked = ["run", "--out", "x"]
    assert parse(asked).seconds == 3 * PART_S
    assert parse([*asked, "--part", "2"]).seconds == PART_S
    assert parse([*asked, "--stages", "kernels", "trace"]).seconds == PART_S
    assert parse([*asked, "--seconds", "100"]).seconds == 100


@pytest.mark.slow
def test_a_failed_stage_leaves_its_last_lines_and_the_next_one_runs(tmp_path: Path) -> None:
    code, stages = run(
        tmp_path,
        {
            stage("breaks"): f"{FIGURE}; print('a word'); raise SystemExit('the last one')",
            stage("dies"): "import os; os.kill(os.getpid(), 9)",
            stage("hangs", 0.5): "import time; time.sleep(60)",
            stage("works"): f"{FIGURE}; print('figure [1]'); print('figure cut')",
        },
    )
    assert code == 1
    assert [(one["stage"], one["state"]) for one in stages] == [
        ("breaks", "failed"),
        ("dies", "failed"),
        ("hangs", "failed"),
        ("works", "passed"),
    ]
    breaks, dies, hangs, works = stages
    assert breaks["reason"] == "exit code 1"
    assert breaks["last_lines"] == ["a word", "the last one"]
    assert breaks["figures"] == works["figures"]
    assert dies["reason"] == "killed by SIGKILL"
    assert hangs["reason"].startswith("stopped at its time limit of 0 s")
    assert "3 failed, 1 passed" in (tmp_path / "summary.txt").read_text()
    assert "the last one" in (tmp_path / "log.txt").read_text()


RUNNER = """
import os, sys, time
from pathlib import Path
from tools.gpu_lease.lease import Results, run_stages
from tools.gpu_lease.stages import Stage
figure, out = sys.argv[1], Path(sys.argv[2])
hangs = figure.replace("1.5", "%d").replace("', f", "' % __import__('os').getpid(), f")
hangs += "; import time; time.sleep(60)"
programs = {"first": figure, "second": hangs}
run_stages(
    [Stage(name, 1, 20.0, "a test", "figures") for name in programs],
    lambda one: [sys.executable, "-S", "-c", programs[one.name]],
    dict(os.environ), Results(out, {}), time.monotonic() + 100.0, lambda line: None,
)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_the_results_of_every_stage_and_figure_so_far(tmp_path: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, FIGURE, str(tmp_path)], cwd=ROOT)
    stages: list[Any] = []
    try:
        give_up_at = time.monotonic() + DEADLINE_S
        while len(stages) < 2 or not stages[1]["figures"]:
            assert time.monotonic() < give_up_at, stages
            assert runner.poll() is None
            time.sleep(0.02)  # polling, with a deadline
            with suppress(FileNotFoundError):
                stages = stages_in(tmp_path)
    finally:
        runner.kill()
        runner.wait()
    os.kill(stages[1]["figures"][0]["value"], signal.SIGKILL)
    stages = stages_in(tmp_path)
    assert [(one["stage"], one["state"]) for one in stages] == [
        ("first", "passed"),
        ("second", "running"),
    ]
    assert stages[0]["figures"] == [{"case": "a", "engine": "b", "value": 1.5, "unit": "s"}]


def test_a_log_is_bounded(tmp_path: Path) -> None:
    results = Results(tmp_path, {})
    for _ in range(3):
        results.log("x" * (MAX_LOG_BYTES // 2))
    assert (tmp_path / "log.txt").stat().st_size == MAX_LOG_BYTES


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_runs_and_one_line_says_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--out", str(tmp_path / "out")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("gpu-lease: torch ")
    assert "install a CUDA build of torch" in line or "run this where nvidia-smi lists one" in line
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_refused_with_the_cure(tmp_path: Path) -> None:
    assert prepare([], tmp_path, tmp_path) is None
    with pytest.raises(RefusedError, match=r"2 packages are missing \(trio, msgspec .*pack --pyth"):
        prepare(["trio", "msgspec"], tmp_path, tmp_path)
    manifest = {"python": "3.9", "glibc": "2.17", "wheels": {}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RefusedError, match=r"wheels are for Python 3.9, this is .* PYTHON="):
        prepare(["trio"], tmp_path, tmp_path)
    manifest |= {"python": python_version(), "glibc": "9.9"}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RefusedError, match=r"need glibc 9.9, this machine has .* --glibc"):
        prepare(["trio"], tmp_path, tmp_path)
    manifest |= {"glibc": "2.1", "wheels": {"a-1-py3-none-any.whl": "0" * 64}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RefusedError, match="is missing or damaged: copy the whole folder again"):
        prepare(["trio"], tmp_path, tmp_path)


def test_what_a_lease_needs_is_what_the_project_names_without_torch() -> None:
    names = " ".join(needs())
    assert "trio==" in names
    assert "pytest-trio" in names
    assert "torch" not in names
    assert "playwright" not in names
    assert lacking(["trio>=0.1", "trio>=99", "no-such-package>=1"]) == [
        "trio>=99",
        "no-such-package>=1",
    ]


def test_wheels_that_are_too_large_to_travel_are_refused(tmp_path: Path) -> None:
    num_bytes = write_wheel(tmp_path, "one", "1.0").stat().st_size
    said: list[str] = []
    check_size(tmp_path, MAX_BYTES - num_bytes, said.append)
    assert "1 wheels" in said[-1]
    assert "64.0 of 64 MiB" in said[-1]
    with pytest.raises(PackError, match="too large to copy"):
        check_size(tmp_path, MAX_BYTES - num_bytes + 1, said.append)


def test_what_wheels_require_is_read_for_the_target_not_for_this_python(tmp_path: Path) -> None:
    requires = (
        "backport>=1; python_version < '3.12'",
        "further>=2; python_version >= '3.12'",
        "special; extra == 'more'",
        "torch>=2",
        "elsewhere; sys_platform == 'win32'",
    )
    write_wheel(tmp_path, "one", "1.0", *requires)
    assert unmet(tmp_path, ["one>=1"], "3.12", {"torch"}) == ["further>=2"]
    assert unmet(tmp_path, ["one>=1"], "3.11", {"torch"}) == ["backport>=1"]
    assert unmet(tmp_path, ["one>=2"], "3.12", {"torch"}) == ["one>=2"]
    write_wheel(tmp_path, "further", "2.1")
    assert unmet(tmp_path, ["one>=1"], "3.12", {"torch"}) == []
    assert unmet(tmp_path, ["one[more]>=1"], "3.12", {"torch"}) == ["special"]


@pytest.mark.slow
def test_packed_wheels_are_installed_without_an_index_and_triolet_has_its_version(
    tmp_path: Path,
) -> None:
    write_wheel(tmp_path, "one", "1.0")
    digest = "5" * 64
    manifest = {
        "python": python_version(),
        "glibc": "2.1",
        "wheels": {"one-1.0-py3-none-any.whl": digest},
    }
    site = install(tmp_path, manifest, tmp_path / "made", DEADLINE_S)
    program = (
        "import one; from importlib.metadata import version; print(one.ANSWER, version('triolet'))"
    )
    said = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["42", "0.1.0"]
    assert install(tmp_path, manifest, tmp_path / "made", 0.0) == site  # reused
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(PackError, match="missing or damaged"):
        read_manifest(tmp_path)


def test_the_roofline_is_bytes_at_first_and_operations_in_the_end() -> None:
    shape, peaks = SHAPES["8b"], KNOWN["H100"]
    assert num_parameters(shape) == pytest.approx(7.5e9, rel=0.01)
    assert shape.kv_bytes_per_token == 128 * 1024
    assert decode_ceiling(shape, 1, 1024, peaks) == pytest.approx(221, rel=0.02)
    assert decode_ceiling(shape, 256, 1024, peaks) == pytest.approx(17_400, rel=0.02)
    assert decode_ceiling(shape, 100_000, 0, peaks) == pytest.approx(prefill_ceiling(shape, peaks))
    assert 0.55 * prefill_ceiling(shape, peaks) == pytest.approx(37_000, rel=0.03)


def test_a_card_is_known_by_its_name() -> None:
    assert peaks_of("NVIDIA H100 80GB HBM3") == KNOWN["H100"]
    assert peaks_of("NVIDIA H200") == KNOWN["H200"]
    assert peaks_of("NVIDIA L40S") == KNOWN["L40S"]
    assert peaks_of("a card of tomorrow") is None


def test_dummy_weights_are_the_same_each_time_and_differ_by_tensor(tmp_path: Path) -> None:
    checkpoint = DummyCheckpoint(tmp_path)
    tensors = [torch.empty(8, 4, dtype=torch.bfloat16) for _ in range(3)]
    for tensor, name in zip(tensors, ("a", "a", "b"), strict=True):
        checkpoint.read(name, (8, 4), tensor)
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])
    norm = torch.zeros(4)
    checkpoint.read("norm", (4,), norm)
    assert norm.tolist() == [1.0] * 4


@pytest.mark.slow
def test_a_rehearsed_stage_runs_end_to_end_and_writes_every_figure(tmp_path: Path) -> None:
    assert main(["run", "--rehearse", "--out", str(tmp_path), "--stages", "small"]) == 0
    [small] = stages_in(tmp_path)
    assert small["state"] == "passed"
    figures = small["figures"]
    assert sum(" decode " in one["case"] for one in figures) == 4 * len(IN_REHEARSAL.batches)
    assert all(one["value"] > 0 for one in figures)
    assert figures[-1]["case"] == "15m prefill 64"


def test_a_stream_is_read_as_its_text() -> None:
    pieces = [
        b'24\r\ndata: {"choices": [{"text": "one "}]}\n\n',
        b'\r\n30\r\ndata: {"choices": [{"te',
        b'xt": "two"}]}\n\ndata: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n',
    ]
    assert gpu_runs.text_of(Stream(pieces=pieces)) == "one two"
