"""Tests of `triolet doctor` on this machine, with valid and invalid models."""

from __future__ import annotations

import io
import json
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from ops.cli import main
from ops.cli.check_machine import (
    Finding,
    FindingStatus,
    check_cpu,
    check_driver,
    check_flash,
    check_kernels,
    check_memory,
    check_open_files,
    check_packages,
    check_python,
    check_triton,
    driver_version,
)
from ops.cli.doctor import WantedFleet, check_auto, serve_command, show
from ops.cli.options import add_models
from ops.settings.form import Settings
from ops.settings.sources import read_settings
from triolet.memory import available_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path


def test_the_machine_that_runs_the_tests_can_serve() -> None:
    for finding in (check_python(), check_packages(), check_cpu(), check_open_files()):
        assert finding.status is not FindingStatus.FAIL, finding


def test_too_little_memory_is_a_warning_with_a_way_out() -> None:
    available = available_memory_bytes()
    assert available is None or check_memory(available * 2).status is FindingStatus.WARN
    assert check_memory(1).status is FindingStatus.OK


def test_nothing_is_said_of_what_a_fleet_takes_whose_model_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{")
    assert main(["doctor", "chat=demo", f"code={tmp_path}", "--port", "0", "--json"]) == 1
    rows = {row["subject"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    said = rows["Memory"]["detail"]
    assert said.endswith("the need of the fleet is unknown until its model can be read")
    assert rows["Memory"]["status"] == "ok"


@pytest.mark.slow
def test_a_broken_model_fails_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{")
    assert (
        main(
            [
                "doctor",
                str(tmp_path),
                "--port",
                "1",
                "--host",
                "192.0.2.1",
                "--json",
                "--allow-remote-clients",
            ]
        )
        == 1
    )
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    failed = {row["subject"] for row in report["findings"] if row["status"] == "fail"}
    assert failed == {"Model", "Port 1"}
    assert all(row["remedy"] for row in report["findings"] if row["status"] != "ok")
    subjects = [row["subject"] for row in report["findings"]]
    assert subjects[:5] == ["Python", "Packages", "CPU", "Kernels", "Memory"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (FindingStatus.OK, "All checks passed"),
        (FindingStatus.WARN, "can serve"),
        (FindingStatus.FAIL, "1 to fix"),
    ],
)
def test_the_last_line_sums_it_up(status: FindingStatus, words: str) -> None:
    screen = io.StringIO()
    findings = [Finding("CPU", status, "2 cores", "buy more")]
    show(findings, "triolet serve /models/a", Console(file=screen, width=80))
    assert words in screen.getvalue()
    assert "→ buy more" in screen.getvalue()
    assert ("triolet serve /models/a" in screen.getvalue()) is (status is not FindingStatus.FAIL)


def test_the_last_line_is_the_command_for_what_was_looked_at() -> None:
    words = ["/models/my model", *"--port 8001 --dtype bfloat16 --max-model-len 64".split()]
    words += ["--set", "worker.engine.prefix_cache=false"]
    settings = read_settings(None, ["server.port=8001"]).settings()
    assert serve_command(WantedFleet(settings, words), 8001) == (
        "triolet serve '/models/my model' --port 8001 --dtype bfloat16 --max-model-len 64 "
        "--set worker.engine.prefix_cache=false"
    )
    assert serve_command(WantedFleet(Settings()), 8000) == "triolet serve"


def test_the_command_beside_a_running_server_has_a_port_that_is_free() -> None:
    assert (
        serve_command(WantedFleet(Settings(), ["demo"]), 8002) == "triolet serve demo --port 8002"
    )
    words = ["demo", "--port", "8000", "--decode", "2"]
    command = serve_command(WantedFleet(Settings(), words), 8001)
    assert command == "triolet serve demo --decode 2 --port 8001"


def test_each_model_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    words = ["doctor", "chat=demo", f"code={tmp_path}", "--port", "0", "--kv-pool", "1MiB"]
    assert main([*words, "--json"]) == 1
    rows = {row["subject"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    assert rows["Model chat"]["status"] == "ok"
    assert rows["Model code"]["status"] == "fail"
    assert "is not valid JSON" in rows["Model code"]["detail"]
    assert main(["doctor", "demo", "chat=demo"]) == 2
    assert "'demo' has no public name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "sets", "words"),
    [
        ("a=demo b=demo", ("auto.ladder=a,b",), ""),
        (
            "a=demo b=demo",
            ("auto.ladder=a,bb",),
            "[auto] ladder names 'bb', which is not a model of this fleet",
        ),
        ("a=demo b=demo", ("auto.ladder=a", 'auto.limits=[{"model":"c"}]'), "[auto] limits names"),
        ("a=demo auto=demo", ("auto.ladder=a",), "a model is called 'auto' too"),
        ("a=demo", ("auto.ladder=a", "models.a.aliases=auto"), "a model is called 'auto' too"),
        ("demo", ("auto.ladder=a",), "this fleet has a single unnamed model"),
        ("a=demo b=demo", ("auto.ladder=a", "server.tenants.file=tenants.toml"), ""),
        (
            "a=demo c=demo",
            ("auto.ladder=a", "server.tenants.file=tenants.toml"),
            "tenants.toml: [tenants.alice] auto names 'b', which is not a model of this fleet",
        ),
        (
            "a=demo b=demo",
            ("server.tenants.file=tenants.toml",),
            "[tenants.alice] auto is a ladder of models, and `model: auto` is off",
        ),
    ],
)
def test_ladders_are_of_models_of_the_fleet(
    models: str, sets: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = f'cache_secret = "{"0" * 64}"\n'
    (tmp_path / "tenants.toml").write_text(f'{secret}[tenants.alice]\nauto = ["b"]\n')
    sources = read_settings(None, sets)
    add_models(sources, models.split())
    (finding,) = check_auto(sources.settings())
    assert finding.status is (FindingStatus.FAIL if words else FindingStatus.OK)
    assert words in finding.detail
    assert bool(finding.remedy) == bool(words), "what to do"


def test_nothing_is_said_of_ladders_where_there_are_none() -> None:
    assert check_auto(Settings()) == []


def test_kernels_are_missed_only_where_they_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernels(frozenset({"asimd"})).status is FindingStatus.OK
    flags = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check_kernels(flags).status is FindingStatus.WARN
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name.endswith("_avx2") else None
    )
    assert (check_kernels(flags).status, check_kernels(flags).detail) == (FindingStatus.OK, "avx2")


def triton_findings(include: Path) -> dict[str, Finding]:
    return {finding.subject: finding for finding in check_triton(include)}


def test_triton_needs_a_compiler_and_pythons_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    bare = triton_findings(tmp_path)
    assert (bare["C compiler"].status, bare["Python.h"].status) == (
        FindingStatus.WARN,
        FindingStatus.WARN,
    )
    assert "install gcc or clang" in bare["C compiler"].remedy
    assert "-dev" in bare["Python.h"].remedy
    (tmp_path / "Python.h").touch()
    (tmp_path / "clang").touch(mode=0o755)
    found = triton_findings(tmp_path)
    assert (found["C compiler"].status, found["Python.h"].status) == (
        FindingStatus.OK,
        FindingStatus.OK,
    )
    assert found["C compiler"].detail == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "icc")
    assert "CC is icc" in triton_findings(tmp_path)["C compiler"].detail


def test_triton_is_recommended_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"triton": "3.5.1"}
    monkeypatch.setattr("ops.cli.check_machine.version", versions.__getitem__)
    old = triton_findings(tmp_path)["Triton"]
    assert (old.status, "wanted >=3.6" in old.detail) == (FindingStatus.WARN, True)
    assert "pip install 'triolet[gpu]'" in old.remedy
    versions["triton"] = "3.6.0"
    assert triton_findings(tmp_path)["Triton"].status is FindingStatus.OK


def test_flash_attn_is_judged_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"flash-attn": "2.8.3.post1"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr("ops.cli.check_machine.version", version)
    assert [finding.status for finding in check_flash()] == [FindingStatus.OK]
    found["flash-attn"] = "2.8.4"
    assert [finding.remedy for finding in check_flash()] == ["pip install 'triolet[flash]'"]
    found.clear()
    assert check_flash() == []


@pytest.mark.parametrize(
    ("driver", "cuda", "status"),
    [
        ("580.65.06", "13.0", FindingStatus.OK),
        ("570.124.06", "13.0", FindingStatus.WARN),
        ("570.124.06", "12.8", FindingStatus.OK),
        ("470.82.01", "12.1", FindingStatus.WARN),
        (None, "13.0", FindingStatus.OK),
    ],
)
def test_a_driver_is_held_against_the_cuda_of_torch(
    driver: str | None, cuda: str, status: FindingStatus
) -> None:
    finding = check_driver(driver, cuda)
    assert finding.status is status
    assert bool(finding.remedy) is (status is FindingStatus.WARN)


def test_the_drivers_version_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 2025\n")
    assert driver_version(file) == "570.124.06"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    assert driver_version(file) == "580.65.06"
