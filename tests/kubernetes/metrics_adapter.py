"""Test helper: serves the desired number of workers as an external metric through an aggregated
API, as prometheus-adapter and KEDA do."""

from __future__ import annotations

import json
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import parse_qs, urlsplit

from tests.store.registry.test_tls import write_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

METRIC: Final = "triolet_desired_workers"
GROUP: Final = "external.metrics.k8s.io"
ROOT: Final = f"/apis/{GROUP}/v1beta1"
PORT: Final = 6550
OBJECTS: Final[tuple[dict[str, Any], ...]] = (
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "metrics-adapter", "namespace": "kube-system"},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": PORT}]},
    },
    {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1beta1.{GROUP}"},
        "spec": {
            "service": {"name": "metrics-adapter", "namespace": "kube-system", "port": PORT},
            "group": GROUP,
            "version": "v1beta1",
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    },
)


class Adapter(BaseHTTPRequestHandler):
    """Returns the numbers of its class by role."""

    desired: ClassVar[dict[str, int]] = {}

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        if where.path.rstrip("/") == ROOT:
            found: dict[str, Any] = {
                **{"kind": "APIResourceList", "apiVersion": "v1"},
                "groupVersion": f"{GROUP}/v1beta1",
                "resources": [
                    {
                        **{"name": METRIC, "singularName": "", "namespaced": True},
                        **{"kind": "ExternalMetricValueList", "verbs": ["get"]},
                    }
                ],
            }
        else:
            [selector] = parse_qs(where.query).get("labelSelector", [""])
            labels = dict(part.split("=", 1) for part in selector.split(",") if part)
            value = {
                **{"metricName": METRIC, "metricLabels": labels},
                "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "value": str(self.desired.get(labels.get("role", ""), 1)),
            }
            kind = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/v1beta1"}
            found = {**kind, "metadata": {}, "items": [value]}
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log."""


@contextmanager
def running_adapter(folder: Path) -> Iterator[dict[str, int]]:
    """Run the adapter; yield its numbers by role."""
    write_certificate(folder)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", PORT), Adapter) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Adapter.desired
        server.shutdown()
