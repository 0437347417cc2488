"""`triolet doctor`'s checks of the model, the port, a running server and the socket directory."""

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
from .check_machine import Finding, FindingStatus
from .options import as_typed

if TYPE_CHECKING:
    from pathlib import Path

    from engine.preflight.check import CheckedModel
    from triolet.config import EngineConfig

ROUND_TRIP_TIMEOUT_S: Final = 5.0
MAX_COMPLAINT: Final = 1000
"""Maximum characters of a server's readiness error, which has a sentence per missing worker."""


@within_check_time()
def check_model(
    model: str | Path | None, engine: EngineConfig
) -> tuple[list[Finding], CheckedModel | None]:
    """Check a model, its settings and the device as `triolet serve` does. Return the findings, and
    the checked model unless it cannot be served."""
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
    """Return the finding about a model that cannot be served."""
    cause, _, remedy = as_typed(one_line(fault)).partition("; ")
    return Finding("Model", FindingStatus.FAIL, cause, remedy)


def check_port(host: str, port: int) -> tuple[Finding, int]:
    """Check that a server can listen on a port. Return the finding and a free port."""
    subject = f"Port {port}"
    try:
        claim_port(host, port)
    except PortTaken as taken:
        cause, _, remedy = str(taken).partition("; ")
        if taken.holder is None:
            return Finding(subject, FindingStatus.FAIL, cause, remedy), taken.free
        complaint = taken.holder.complaint[:MAX_COMPLAINT]
        remedy = f"port {taken.free} is free for a second server"
        if complaint:
            remedy += "; the log of the first one says why it is not ready"
        state = f" and is not ready: {complaint}" if complaint else " and is ready"
        return Finding(subject, FindingStatus.WARN, f"{cause}{state}", remedy), taken.free
    except ConfigError as error:
        cause, _, remedy = str(error).partition("; ")
        return Finding(subject, FindingStatus.FAIL, cause, remedy), port
    return Finding(subject, FindingStatus.OK, f"free on {host}"), port


def check_links(parent: Path) -> list[Finding]:
    """Create a socket directory in `parent` and send a frame there and back."""
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
        remedy = "check that the directory allows Unix sockets, or set TMPDIR to another one"
        cause = one_line(str(error)) or "no answer"
        return [place, Finding("ZeroMQ", FindingStatus.FAIL, f"no round trip: {cause}", remedy)]
    return [
        place,
        Finding("ZeroMQ", FindingStatus.OK, f"round trip over ipc in {took_s * 1000:.2f} ms"),
    ]


async def _round_trip(address: str) -> float:
    """Return the round-trip time of a frame in seconds, connecting not included."""
    link = LinkConfig()
    network = ZmqNetwork(link)
    bounds = {"hwm": link.control_hwm, "max_frame_bytes": link.max_control_frame_bytes}
    try:
        with trio.fail_after(ROUND_TRIP_TIMEOUT_S):
            listener = network.listen(address, **bounds)
            connection = network.connect(address, b"doctor", **bounds)
            for _ in range(2):
                # The first round includes connecting; only the second one is measured.
                began = time.perf_counter()
                await connection.send(Goodbye("ping"))
                message = (await listener.receive_many())[0]
                listener.send_nowait(message.sender, Goodbye("pong"))
                await connection.receive_many()
            return time.perf_counter() - began
    finally:
        network.close()
