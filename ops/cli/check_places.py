"""What `triolet doctor` asks of the model, the port, the sockets' place and a running server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import trio

from store.model_dir.bounded import within_check_time
from transport.frames import Goodbye
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.errors import ConfigError, TrioletError
from triolet.plain_text import one_line
from triolet.units import show_size

from ..models.model_directory import check_start, check_text, model_faults, shown_path
from ..ports import PortTaken, claim_port
from ..private_directory import private_directory
from .finding import Finding, FindingStatus
from .options import as_typed

if TYPE_CHECKING:
    from pathlib import Path

    from engine.preflight.check import CheckedModel
    from triolet.config import EngineConfig

ROUND_TRIP_TIMEOUT_S: Final = 5.0
MAX_COMPLAINT: Final = 1000
"""Characters of what keeps a server from being ready: a sentence for each of several workers."""


@within_check_time()
def check_model(
    model: str | Path | None, engine: EngineConfig
) -> tuple[list[Finding], CheckedModel | None]:
    """Look at a model, its settings and the device as `triolet serve` does before it starts, and
    return all that keeps it from being served."""
    try:
        path, found = check_start(model, engine)
        check_text(path)
    except ConfigError as error:
        return [failed_model(fault) for fault in model_faults(model, error)], None
    detail = (
        f"{shown_path(path)}: {found.config.architecture}, "
        f"{show_size(found.weight_bytes)} of weights, context of {found.max_model_len}"
    )
    return [Finding("Model", FindingStatus.OK, detail)], found


def failed_model(fault: str) -> Finding:
    """Return what is said of a model that cannot be served."""
    cause, _, remedy = as_typed(one_line(fault)).partition("; ")
    return Finding("Model", FindingStatus.FAIL, cause, remedy)


def check_port(host: str, port: int) -> tuple[Finding, int]:
    """See whether a server could listen there, or who does already; return a port that is free."""
    subject = f"Port {port}"
    try:
        claim_port(host, port)
    except PortTaken as taken:
        cause, _, remedy = str(taken).partition("; ")
        if taken.holder is None:
            return Finding(subject, FindingStatus.FAIL, cause, remedy), taken.free
        complaint = taken.holder.complaint[:MAX_COMPLAINT]
        remedy = f"port {taken.free} is free for another one beside it"
        if complaint:
            remedy += "; see its log: it waits for a worker, or it starts or shuts down"
        state = f" and is not ready: {complaint}" if complaint else " and is ready"
        return Finding(subject, FindingStatus.WARN, f"{cause}{state}", remedy), taken.free
    except ConfigError as error:
        cause, _, remedy = str(error).partition("; ")
        return Finding(subject, FindingStatus.FAIL, cause, remedy), port
    return Finding(subject, FindingStatus.OK, f"free on {host}"), port


def check_links(parent: Path) -> list[Finding]:
    """Make a directory for sockets in `parent` and send a frame through it and back."""
    try:
        with private_directory(parent) as directory:
            mode = directory.stat().st_mode & 0o777
            place = Finding(
                "Sockets", FindingStatus.OK, f"{directory.parent}, private (mode {mode:04o})"
            )
            took_s = trio.run(_round_trip, f"ipc://{directory}/doctor")
    except ConfigError as error:
        cause, _, remedy = str(error).rpartition("; ")
        return [Finding("Sockets", FindingStatus.FAIL, cause, remedy)]
    except (TrioletError, trio.TooSlowError) as error:
        remedy = "see whether the directory allows Unix sockets; set TMPDIR to another one"
        cause = one_line(str(error)) or "no answer"
        return [place, Finding("ZeroMQ", FindingStatus.FAIL, f"no round trip: {cause}", remedy)]
    return [
        place,
        Finding("ZeroMQ", FindingStatus.OK, f"round trip over ipc in {took_s * 1000:.2f} ms"),
    ]


async def _round_trip(address: str) -> float:
    """Return how long a frame takes there and back, once connected."""
    link = LinkConfig()
    network = ZmqNetwork(link)
    bounds = {"hwm": link.control_hwm, "max_frame_bytes": link.max_control_frame_bytes}
    try:
        with trio.fail_after(ROUND_TRIP_TIMEOUT_S):
            listener = network.listen(address, **bounds)
            connection = network.connect(address, b"doctor", **bounds)
            for _ in range(2):
                # The first round waits for the connection too; the second is the one that counts.
                began = time.perf_counter()
                await connection.send(Goodbye("ping"))
                message = (await listener.receive_many())[0]
                listener.send_nowait(message.sender, Goodbye("pong"))
                await connection.receive_many()
            return time.perf_counter() - began
    finally:
        network.close()
