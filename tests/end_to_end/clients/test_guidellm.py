"""Tests of a concurrent guidellm run against the fleet with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.scripted_model import DEMO

from .installed import needed

if TYPE_CHECKING:
    from tests.end_to_end.fleet_process import FleetProcess

needed("guidellm")
pytestmark = pytest.mark.slow

REQUESTS = 10
RUN_TIMEOUT_S = 280.0
"""It starts several processes that import transformers."""


def test_ten_of_ten_concurrent_requests_are_completed(fleet: FleetProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={fleet.url},model=demo",
        "tokenizer": f"kind=huggingface_auto,model={DEMO}",
        "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "profile": "kind=concurrent,streams=5",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "output": f"kind=json,path={report}",
    }
    ended = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"),
            *(part for name, value in options.items() for part in (f"--{name}", value)),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
