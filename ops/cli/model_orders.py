"""`triolet model load|sleep|wake|unload`: asks the control of a fleet that runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from triolet.control_protocol import ADMIN_SOCKET

from ..exit_codes import CommandFailed
from ..http_trust import verify_for
from ..running_fleets import find_fleet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import httpx2

POLL_S: Final = 0.2
"""Between two looks at an operation; a load takes from some tenths of a second to minutes."""
ANSWER_TIMEOUT_S: Final = 30.0
"""For one answer of control, which writes to the audit log first."""
WAIT_S: Final = 1800.0
"""For the end of an operation: control gives a start 15 minutes, and a wait for room five."""
LOCAL_URL: Final = "http://localhost"
"""For the names of a request that goes to a Unix socket."""
HELP: Final = {
    "load": "Start the workers of a model, and wait until they are ready.",
    "wake": "The same, for a model that sleeps.",
    "sleep": "End the workers of a model; its files stay in memory, and the next request wakes it.",
    "unload": "End the workers of a model, and give up the memory of its files too.",
}


def add_orders(app: typer.Typer) -> None:
    """Add a command for each order."""
    for action, text in HELP.items():
        app.command(action, help=text)(_command(action))


def _command(action: str) -> Callable[..., None]:
    def command(
        name: Annotated[str, typer.Argument(metavar="NAME", help="As `triolet serve` was told.")],
        port: Annotated[
            int | None, typer.Option(min=1, max=65_535, help="Of the fleet, if several run here.")
        ] = None,
    ) -> None:
        run_order(find_fleet(port).directory / ADMIN_SOCKET, name, action)

    return command


def run_order(path: Path, name: str, action: str) -> None:
    """Give an order and show how far it is, until it is over.

    Args:
      path: of control's Unix socket.
      name: of the model.
      action: load, wake, sleep or unload.

    Raises:
      CommandFailed: it was refused, has failed or does not end, or control does not answer.
    """
    import httpx2  # here: every command of `triolet` imports this file

    began, shown = time.monotonic(), ""
    transport = httpx2.HTTPTransport(uds=str(path), verify=verify_for(LOCAL_URL))
    with httpx2.Client(transport=transport, base_url=LOCAL_URL, timeout=ANSWER_TIMEOUT_S) as client:
        operation = _ask(client, "POST", f"/admin/models/{name}/{action}")
        while True:
            if operation["progress"] != shown:
                shown = operation["progress"]
                typer.echo(f"{time.monotonic() - began:6.1f} s  {shown}")
            match operation["status"]:
                case "done":
                    return
                case "failed":
                    raise CommandFailed(f"{action} {name}: {shown}")
            if time.monotonic() - began >= WAIT_S:
                raise CommandFailed(
                    f"{action} {name} is not over after {WAIT_S:.0f} s ({shown}); it goes on, and "
                    "`triolet model ps` shows how far it is"
                )
            time.sleep(POLL_S)
            operation = _ask(client, "GET", f"/admin/operations/{operation['id']}")


def _ask(client: httpx2.Client, method: str, path: str) -> dict[str, Any]:
    from httpx2 import HTTPError

    try:
        answer = client.request(method, path)
    except HTTPError as error:
        raise CommandFailed(
            f"control does not answer: {error}; only a fleet that serves models by names "
            "(`triolet serve NAME=MODEL …`) has it. There it is started again when it ends, and "
            "what it had begun goes on: try again in a minute; the fleet's log says why it ended"
        ) from error
    body = answer.json()
    if answer.is_error:
        raise CommandFailed(body["error"]["message"])
    return dict(body)
