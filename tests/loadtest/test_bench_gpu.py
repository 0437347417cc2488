"""The GPU's plan fits into ten minutes, and its roofline is what physics says."""

from __future__ import annotations

import pytest
import torch

from loadtest.bench import gpu
from loadtest.bench.gpu_roofline import (
    KNOWN,
    decode_ceiling,
    num_parameters,
    peaks_of,
    prefill_ceiling,
)
from loadtest.bench.gpu_stages import STAGES, TOTAL_S, refusal
from loadtest.bench.model import SHAPES
from loadtest.bench.report import Ratio


def test_the_plan_fits_into_its_time_and_every_stage_is_there() -> None:
    assert sum(stage.most_s for stage in STAGES) <= TOTAL_S == 600
    assert [stage.name for stage in STAGES] == list(gpu.RUN)
    assert refusal(STAGES[-1], TOTAL_S - STAGES[-1].most_s, TOTAL_S) is None
    reason = refusal(STAGES[-1], TOTAL_S - STAGES[-1].most_s + 1, TOTAL_S)
    assert reason == "89 s were left, and it may take 90"


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


def test_only_what_both_have_measured_is_compared() -> None:
    findings = gpu.Findings()
    findings.speeds = {("8b", 1): {"ours": 150.0, "peer": 100.0}, ("8b", 32): {"ours": 9.0}}
    assert list(findings.ratios().values()) == [Ratio(1.5, 1.0)]
    findings.add("a case", "an engine", 50.0, "tokens/s", 200.0)
    findings.add("another", "an engine", 50.0, "tokens/s", None)
    assert [row["share_of_roofline"] for row in findings.rows] == [0.25, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_plan_says_so_and_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 0
    assert "torch sees no NVIDIA GPU here" in capsys.readouterr().out
