"""Tests that an outage pages someone: a real fleet, Prometheus and Alertmanager, and a webhook that
receives the alerts."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest
import yaml

from . import paced
from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .fleet_process import FleetProcess

RULES: Final = Path(__file__).parents[2] / "ops" / "monitoring" / "slo_rules.yml"
PROGRAMS: Final = ("prometheus", "prometheus-alertmanager")
AWAITED: Final = {("TrioletSloPage", "firing"), ("TrioletSloDeployment", "firing")}
ALL_GOOD: Final = 20
RESOLVED_S: Final = 300.0
"""Time until the 30 s window of the deployment alert is good again and Alertmanager has reported
it."""


class Webhook(ThreadingHTTPServer):
    """Receives notifications.

    Attributes:
      came_at: time of the first notification by alert name and status.
      alerts: all alerts received.
      query_url: URL of a query for the objectives' events.
    """

    def __init__(self, prometheus: str) -> None:
        super().__init__(("127.0.0.1", 0), WebhookHandler)
        self.query_url = f"http://{prometheus}/api/v1/query?query=triolet_slo_events_total"
        self.came_at: dict[tuple[str, str], float] = {}
        self.alerts: list[dict[str, Any]] = []

    def take(self, alerts: list[dict[str, Any]]) -> None:
        for alert in alerts:
            self.alerts.append(alert)
            key = alert["labels"]["alertname"], alert["status"]
            self.came_at.setdefault(key, time.monotonic())


class WebhookHandler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.take(json.loads(body)["alerts"])
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def running(log: Path, *command: str) -> Iterator[None]:
    """Run a program, and end it on exit."""
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def to_the_webhook(url: str) -> dict[str, Any]:
    """Return a configuration of Alertmanager that sends every alert to a webhook at once."""
    return {
        "route": {
            "receiver": "hook",
            "group_by": ["alertname"],
            "group_wait": "0s",
            "group_interval": "1s",
        },
        "receivers": [{"name": "hook", "webhook_configs": [{"url": url}]}],
    }


@contextmanager
def monitored(
    folder: Path,
    fleet_url: str,
    rules: Sequence[Path] = (RULES,),
    routes_to: Callable[[str], dict[str, Any]] = to_the_webhook,
) -> Iterator[Webhook]:
    """Run Prometheus and Alertmanager for a fleet.

    Args:
      folder: folder for their files.
      fleet_url: URL of the fleet.
      rules: the rules.
      routes_to: returns the configuration of Alertmanager for the URL of a webhook.
    """
    prometheus, manager = free_address(), free_address()
    with ExitStack() as stack:
        webhook = stack.enter_context(Webhook(prometheus))
        thread = threading.Thread(target=webhook.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(webhook.shutdown)
        scraping = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(file) for file in rules],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
            "scrape_configs": [
                {
                    "job_name": "triolet",
                    "static_configs": [{"targets": [fleet_url.removeprefix("http://")]}],
                }
            ],
        }
        url = f"http://127.0.0.1:{webhook.server_port}/"
        for name, document in (("prometheus", scraping), ("alertmanager", routes_to(url))):
            (folder / f"{name}.yml").write_text(yaml.safe_dump(document))
        stack.enter_context(
            running(
                folder / "alertmanager.log",
                PROGRAMS[1],
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address={manager}",
                "--cluster.listen-address=",
            )
        )
        stack.enter_context(
            running(
                folder / "prometheus.log",
                PROGRAMS[0],
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address={prometheus}",
            )
        )
        yield webhook


def ask(fleet: FleetProcess, *, is_late: bool = False) -> int:
    """Send a request, optionally with a deadline that it cannot meet; return the status."""
    body = {"prompt": "Once", "max_tokens": 60 if is_late else 1, "ignore_eos": True}
    headers = {"x-request-timeout-ms": "300"} if is_late else {}
    return fleet.client.post("/v1/completions", json=body, headers=headers).status_code


def has_counters(fleet: FleetProcess, webhook: Webhook, labels: str = "") -> bool:
    """Return whether Prometheus runs and has the counters of the objectives with these labels."""
    try:
        answer = fleet.client.get(webhook.query_url + labels)
    except httpx2.ConnectError:
        return False
    # It starts with 503.
    return answer.status_code == 200 and bool(answer.json()["data"]["result"])


@pytest.mark.slow
@pytest.mark.proof
def test_missed_deadlines_page_through_prometheus_and_alertmanager(
    start_fleet: Callable[..., FleetProcess],
    tmp_path: Path,
    whole: bool,
    record_property: Callable[[str, object], None],
) -> None:
    if not whole:
        pytest.skip("takes a minute: `make proofs` runs it")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    fleet = start_fleet(command=paced.COMMAND)
    with monitored(tmp_path, fleet.url) as webhook:
        for _ in range(ALL_GOOD):
            assert ask(fleet) == 200
        # Prometheus sees no increase before it has scraped the counters.
        wait_until(
            lambda: has_counters(fleet, webhook),
            PATIENCE_S,
            "Prometheus has the counters",
        )
        assert not webhook.alerts
        began_at = time.monotonic()

        def have_come() -> bool:
            assert ask(fleet, is_late=True) == 504
            return webhook.came_at.keys() >= AWAITED

        wait_until(have_come, PATIENCE_S, "both alerts come")
        report = fleet.client.get("/admin/slo").json()
        available = report["objectives"][0]
        assert "page" in available["alerts"]
        assert [one["is_burning"] for one in available["versions"]] == [True]
        assert {alert["labels"]["sloth_slo"] for alert in webhook.alerts} == {"availability"}
        resolved = ("TrioletSloDeployment", "resolved")
        wait_until(lambda: resolved in webhook.came_at, RESOLVED_S, "the version is good again")
    for (name, status), at in webhook.came_at.items():
        record_property(f"{name} {status} after", round(at - began_at, 1))
        print(f"{name} {status} after {at - began_at:.1f} s")  # noqa: T201
