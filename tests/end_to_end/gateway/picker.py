"""Test helper: an endpoint picker of the Gateway API Inference Extension.

Envoy asks it about each request by gRPC (external processing), and it returns servers in a header.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Final

import grpc
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ProcessingResponse,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)

from tests.end_to_end.fleet_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

    from tests.end_to_end.two_hosts import Hosts

DESTINATION: Final = "x-gateway-destination-endpoint"
PAGE: Final = Path(__file__).parents[3] / "docs" / "operations" / "gateway.md"
YAML: Final = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROUTER: Final = "          - name: envoy.filters.http.router\n"
POLICY: Final = "    lb_policy: LEAST_REQUEST\n"
CLUSTERS: Final = "  clusters:\n"
NUM_THREADS: Final = 8
SIGNALS: Final = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
"""Metrics with vLLM's names: requests, and the share of KV blocks in use."""


def least_loaded(hosts: Hosts) -> str:
    """Return the addresses of the ready servers, the least loaded first."""
    ready = [
        (sum(fleet.metric(f"vllm:{name}") for name in SIGNALS), address)
        for fleet, address in zip(hosts.fleets, hosts.addresses, strict=True)
        if fleet.client.get("/health/ready").status_code == 200
    ]
    return ",".join(address for _, address in sorted(ready))


class _Processor(ExternalProcessorServicer):
    def __init__(self, choose: Callable[[], str]) -> None:
        self._choose = choose

    def Process(
        self, requests: Iterator[ProcessingRequest], _: grpc.ServicerContext
    ) -> Iterator[ProcessingResponse]:
        for _request in requests:
            chosen = HeaderValue(key=DESTINATION, raw_value=self._choose().encode())
            mutation = HeaderMutation(set_headers=[HeaderValueOption(header=chosen)])
            answer = HeadersResponse(response=CommonResponse(header_mutation=mutation))
            yield ProcessingResponse(request_headers=answer)


@contextmanager
def running_picker(
    choose: Callable[[], str], timeout_s: float = PATIENCE_S
) -> Iterator[tuple[dict[str, str], Callable[[], object]]]:
    """Run a picker.

    Args:
      choose: returns servers as `HOST:PORT`, best first, separated by commas.
      timeout_s: how long Envoy waits for its answer.

    Yields:
      The configuration changes that docs/operations/gateway.md describes, and a function that kills
      the picker and all its connections.
    """
    filters, policy, cluster = YAML.findall(PAGE.read_text(encoding="utf-8"))
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        server = grpc.server(threads)
        add_ExternalProcessorServicer_to_server(_Processor(choose), server)
        port = server.add_insecure_port("127.0.0.1:0")
        filters = filters.replace("message_timeout: 0.2s", f"message_timeout: {timeout_s}s")
        cluster = cluster.replace("10.0.1.9, port_value: 9002", f"127.0.0.1, port_value: {port}")
        changes = {
            ROUTER: indent(filters, " " * 10) + ROUTER,
            POLICY: indent(policy, " " * 4),
            CLUSTERS: CLUSTERS + indent(cluster, " " * 2),
        }
        server.start()
        try:
            yield changes, lambda: server.stop(grace=None).wait(PATIENCE_S)
        finally:
            server.stop(grace=None)
