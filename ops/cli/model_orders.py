"""`triolet model load|sleep|wake|unload|add|drop|switch` and `triolet adapter load|unload`.

Each command sends an order to the fleet's control process and waits for the result.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from transport.control_protocol import ADMIN_SOCKET
from triolet.config import SEPARATOR
from triolet.errors import ConfigError
from triolet.home import expanded

from ..chosen_fleet import fleet_to_change
from ..exit_codes import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx2

POLL_S: Final = 0.2
"""Interval of polling an operation; a load takes from tenths of a second to minutes."""
ANSWER_TIMEOUT_S: Final = 30.0
"""Timeout of one response of control, which writes to the audit log first."""
AWAY_S: Final = 30.0
"""Longest outage of control during an operation. The supervisor restarts it within seconds, and it
continues the operation."""
WAIT_S: Final = 1800.0
"""Timeout of an operation. Control allows 15 minutes for a start and five for free memory."""
LOCAL_URL: Final = "http://localhost"
"""Host name of requests that go to a Unix socket."""
HELP: Final = {
    "load": "Start the workers of a model and wait until they are ready.",
    "wake": "Start the workers of a sleeping model and wait until they are ready.",
    "sleep": "Stop the workers of a model but keep its files in memory; the next request wakes it.",
    "unload": "Stop the workers of a model and release the memory of its files.",
}
ELSEWHERE: Final = (
    "If you start servers and workers yourself, as in pods, their settings define the models: "
    "change `server.models`, start the workers, and restart the servers one at a time; `triolet "
    "control` moves a name between their models"
)
NO_CONTROL: Final = (
    "this fleet serves one model without a name and has no control process; start it as `triolet "
    "serve NAME=MODEL`, or with `--memory` or another setting of control, to load, switch, add and "
    "drop models and adapters. If its models have names, it has just been started: try again in a "
    "minute"
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Public name of the model.")]
PortOption = Annotated[
    int | None, typer.Option(min=1, max=65_535, help="Port of the fleet, if several run here.")
]


class ControlAway(CommandFailed):
    """Control does not answer."""


def add_orders(app: typer.Typer) -> None:
    """Add the commands for models of a running fleet."""
    for action, text in HELP.items():
        app.command(action, help=text)(_command(action))
    app.command("add")(add_model)
    app.command("drop")(drop_model)
    app.command("switch")(switch_model)


def adapter_app() -> typer.Typer:
    """Return the commands for LoRA adapters."""
    app = typer.Typer(help="LoRA adapters of a running fleet.", no_args_is_help=True)
    app.command("load")(load_adapter)
    app.command("unload")(unload_adapter)
    return app


def _command(action: str) -> Callable[..., None]:
    def command(name: NameArgument, port: PortOption = None) -> None:
        run_order(_admin(port), name, action)

    return command


def add_model(
    model: Annotated[str, typer.Argument(metavar="NAME=MODEL", help="As for `triolet serve`.")],
    alias: Annotated[
        list[str] | None, typer.Option(help="Additional name for the model; repeatable.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(metavar="N", help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(metavar="N", help="Decode workers.")] = None,
    asleep: Annotated[
        bool, typer.Option("--asleep", help="Start the workers at the first request.")
    ] = False,
    port: PortOption = None,
) -> None:
    """Add a model to a running fleet and wait until it accepts requests."""
    name, is_named, ref = model.partition("=")
    if not (is_named and name and ref):
        raise ConfigError(f"{model!r} is not NAME=MODEL; give both, such as code=code@stable")
    counts = {"prefill": prefill, "decode": decode}
    settings = {
        "name": name,
        "ref": as_meant(ref),
        "aliases": alias or [],
        "start": not asleep,
        **{role: count for role, count in counts.items() if count is not None},
    }
    run(_admin(port), f"add {name}", "POST", "/admin/models", settings)


def drop_model(name: NameArgument, port: PortOption = None) -> None:
    """Remove a model from a running fleet once its requests finish. Its files stay on disk."""
    run(_admin(port), f"drop {name}", "DELETE", f"/admin/models/{name}")


def switch_model(
    name: NameArgument,
    to: Annotated[str, typer.Option(metavar="REF", help="Version, directory or GGUF file.")],
    port: PortOption = None,
) -> None:
    """Serve another version under the same model name; running streams finish on the old one."""
    route = f"/admin/models/{name}/switch"
    run(_admin(port), f"switch {name}", "POST", route, {"ref": as_meant(to)})


def load_adapter(
    adapter: Annotated[
        str,
        typer.Argument(metavar="MODEL:NAME=REF", help="REF is a directory or a stored version."),
    ],
    port: PortOption = None,
) -> None:
    """Load an adapter into the workers of a model and wait until it accepts requests."""
    full, is_named, ref = adapter.partition("=")
    model, name = _adapter_named(full)
    if not (is_named and ref):
        raise ConfigError(
            f"{adapter!r} is not MODEL:NAME=REF; give all three, such as chat:sql=chat-sql:v1"
        )
    settings = {"name": name, "ref": as_meant(ref)}
    run(_admin(port), f"load {full}", "POST", f"/admin/models/{model}/adapters", settings)


def unload_adapter(
    adapter: Annotated[
        str, typer.Argument(metavar="MODEL:NAME", help="Name of the adapter in requests.")
    ],
    port: PortOption = None,
) -> None:
    """Remove an adapter from the workers of a model once its requests finish. Its files stay."""
    model, name = _adapter_named(adapter)
    run(_admin(port), f"unload {adapter}", "DELETE", f"/admin/models/{model}/adapters/{name}")


def _adapter_named(full: str) -> tuple[str, str]:
    """Split MODEL:NAME into the model and the adapter.

    Raises:
      ConfigError: one of them is missing.
    """
    model, _, name = full.rpartition(SEPARATOR)
    if not (model and name) or "/" in full:
        raise ConfigError(f"{full!r} is not MODEL:NAME; give both, such as chat:sql")
    return model, name


def as_meant(ref: str) -> str:
    """Return a reference with an existing path made absolute: the fleet has another working
    directory, and a path takes precedence over a stored version."""
    path = expanded(Path(ref))
    return str(path.absolute()) if path.exists() else ref


def _admin(port: int | None) -> Path:
    """Return the path of control's Unix socket.

    Raises:
      CommandFailed: no fleet runs here, or it has no control.
    """
    try:
        path = fleet_to_change(port, with_control=True).directory / ADMIN_SOCKET
    except CommandFailed as error:
        raise CommandFailed(f"{error}. {ELSEWHERE}") from error
    if not path.exists():
        raise CommandFailed(NO_CONTROL)
    return path


def run_order(path: Path, name: str, action: str) -> None:
    """Start an operation on a model and print its progress until it ends.

    Args:
      path: path of control's Unix socket.
      name: name of the model.
      action: load, wake, sleep or unload.

    Raises:
      CommandFailed: the operation was refused, failed or timed out, or control does not answer.
    """
    run(path, f"{action} {name}", "POST", f"/admin/models/{name}/{action}")


def run(path: Path, what: str, method: str, route: str, body: dict[str, Any] | None = None) -> None:
    """Start an operation and print its progress until it ends.

    Args:
      path: path of control's Unix socket.
      what: name of the operation, for errors.
      method: HTTP method.
      route: HTTP path that starts it.
      body: JSON body.

    Raises:
      CommandFailed: the operation was refused, failed or timed out, or control does not answer.
    """
    began, shown = time.monotonic(), ""
    with _client(path) as client:
        operation, answered = _ask(client, method, route, body), began
        while True:
            if operation["progress"] != shown:
                shown = operation["progress"]
                typer.echo(f"{time.monotonic() - began:6.1f} s  {shown}")
            match operation["status"]:
                case "done":
                    return
                case "failed":
                    raise CommandFailed(f"{what}: {shown}")
            if time.monotonic() - began >= WAIT_S:
                raise CommandFailed(
                    f"{what} has not ended after {WAIT_S:.0f} s ({shown}); it continues, and "
                    "`triolet model ps` shows its state"
                )
            time.sleep(POLL_S)
            try:
                operation = _ask(client, "GET", f"/admin/operations/{operation['id']}")
                answered = time.monotonic()
            except ControlAway:
                if time.monotonic() - answered >= AWAY_S:
                    raise


def ask_control(
    port: int | None, method: str, route: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send one request to a fleet's control, and return the body of the response.

    Raises:
      CommandFailed: control does not answer, or refuses the request.
    """
    with _client(_admin(port)) as client:
        return _ask(client, method, route, body)


def _client(path: Path) -> httpx2.Client:
    """Return a client of control's Unix socket."""
    # Not at the top: every `triolet` command imports this file, and its workers need neither.
    import httpx2

    from ..http_trust import verify_for

    transport = httpx2.HTTPTransport(uds=str(path), verify=verify_for(LOCAL_URL))
    return httpx2.Client(transport=transport, base_url=LOCAL_URL, timeout=ANSWER_TIMEOUT_S)


def _ask(
    client: httpx2.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    from httpx2 import HTTPError

    try:
        answer = client.request(method, path, json=body)
    except HTTPError as error:
        raise ControlAway(
            f"control does not answer {method} {path}: {error}; it is restarted after a failure "
            "and continues its operations: try again in a minute. The fleet's log says why it ended"
        ) from error
    body = answer.json()
    if answer.is_error:
        raise CommandFailed(body["error"]["message"])
    return dict(body)
