"""`triolet model load|sleep|wake|unload|add|drop|switch` and `triolet adapter load|unload`: ask the
control of a fleet that runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from triolet.config import SEPARATOR
from triolet.control_protocol import ADMIN_SOCKET
from triolet.errors import ConfigError
from triolet.home import expanded

from ..chosen_fleet import fleet_to_change
from ..exit_codes import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx2

POLL_S: Final = 0.2
"""Between two looks at an operation; a load takes from some tenths of a second to minutes."""
ANSWER_TIMEOUT_S: Final = 30.0
"""For one answer of control, which writes to the audit log first."""
AWAY_S: Final = 30.0
"""For control to answer again during an operation: it is started again within seconds of its end,
and goes on with the operation."""
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
ELSEWHERE: Final = (
    "Where servers and workers are started one by one, as in pods, the models are those of their "
    "settings: change `server.models`, start the workers, and restart the servers in turn"
)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As `triolet serve` was told.")]
PortOption = Annotated[
    int | None, typer.Option(min=1, max=65_535, help="Of the fleet, if several run here.")
]


class ControlAway(CommandFailed):
    """Control does not answer."""


def add_orders(app: typer.Typer) -> None:
    """Add a command for each order."""
    for action, text in HELP.items():
        app.command(action, help=text)(_command(action))
    app.command("add")(add_model)
    app.command("drop")(drop_model)
    app.command("switch")(switch_model)


def adapter_app() -> typer.Typer:
    """Return the commands for LoRA adapters."""
    app = typer.Typer(help="LoRA adapters of a fleet that runs.", no_args_is_help=True)
    app.command("load")(load_adapter)
    app.command("unload")(unload_adapter)
    return app


def _command(action: str) -> Callable[..., None]:
    def command(name: NameArgument, port: PortOption = None) -> None:
        run_order(fleet_to_change(port).directory / ADMIN_SOCKET, name, action)

    return command


def add_model(
    model: Annotated[str, typer.Argument(metavar="NAME=MODEL", help="As for `triolet serve`.")],
    alias: Annotated[list[str] | None, typer.Option(help="Another name for it.")] = None,
    prefill: Annotated[int | None, typer.Option(metavar="N", help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(metavar="N", help="Decode workers.")] = None,
    asleep: Annotated[bool, typer.Option("--asleep", help="The first request wakes it.")] = False,
    port: PortOption = None,
) -> None:
    """Add a model to the fleet that runs, and wait until requests may name it."""
    name, is_named, ref = model.partition("=")
    if not (is_named and name and ref):
        raise ConfigError(f"{model!r} names no model; give NAME=MODEL, such as code=code@stable")
    counts = {"prefill": prefill, "decode": decode}
    settings = {
        "name": name,
        "ref": _as_meant(ref),
        "aliases": alias or [],
        "start": not asleep,
        **{role: count for role, count in counts.items() if count is not None},
    }
    run(_admin(port), f"add {name}", "POST", "/admin/models", settings)


def drop_model(name: NameArgument, port: PortOption = None) -> None:
    """End the requests and workers of a model in order, and have it no more; its files stay."""
    run(_admin(port), f"drop {name}", "DELETE", f"/admin/models/{name}")


def switch_model(
    name: NameArgument,
    to: Annotated[str, typer.Option(metavar="REF", help="Version, directory or GGUF file.")],
    port: PortOption = None,
) -> None:
    """Serve another version under the name of a model; streams that run finish on the old one."""
    route = f"/admin/models/{name}/switch"
    run(_admin(port), f"switch {name}", "POST", route, {"ref": _as_meant(to)})


def load_adapter(
    adapter: Annotated[
        str, typer.Argument(metavar="MODEL:NAME=REF", help="REF is a directory or a version.")
    ],
    port: PortOption = None,
) -> None:
    """Load an adapter into the workers of a model, and wait until requests may name it."""
    full, is_named, ref = adapter.partition("=")
    model, name = _adapter_named(full)
    if not (is_named and ref):
        raise ConfigError(
            f"{adapter!r} names no adapter; give MODEL:NAME=REF, such as chat:sql=chat-sql:v1"
        )
    settings = {"name": name, "ref": _as_meant(ref)}
    run(_admin(port), f"load {full}", "POST", f"/admin/models/{model}/adapters", settings)


def unload_adapter(
    adapter: Annotated[str, typer.Argument(metavar="MODEL:NAME", help="As requests name it.")],
    port: PortOption = None,
) -> None:
    """Let the requests of an adapter end, and have it in the workers no more; its files stay."""
    model, name = _adapter_named(adapter)
    run(_admin(port), f"unload {adapter}", "DELETE", f"/admin/models/{model}/adapters/{name}")


def _adapter_named(full: str) -> tuple[str, str]:
    """Return the model and the adapter that a name says.

    Raises:
      ConfigError: it does not say both.
    """
    model, _, name = full.rpartition(SEPARATOR)
    if not (model and name) or "/" in full:
        raise ConfigError(
            f"{full!r} names no adapter of a model; give MODEL:NAME, such as chat:sql"
        )
    return model, name


def _as_meant(ref: str) -> str:
    """Return a reference as the fleet understands it: what exists on disk under the name is meant
    first, and the fleet has another directory."""
    path = expanded(Path(ref))
    return str(path.absolute()) if path.exists() else ref


def _admin(port: int | None) -> Path:
    """Return where control of a fleet is asked.

    Raises:
      CommandFailed: no fleet runs here.
    """
    try:
        return fleet_to_change(port).directory / ADMIN_SOCKET
    except CommandFailed as error:
        raise CommandFailed(f"{error}. {ELSEWHERE}") from error


def run_order(path: Path, name: str, action: str) -> None:
    """Give an order and show how far it is, until it is over.

    Args:
      path: of control's Unix socket.
      name: of the model.
      action: load, wake, sleep or unload.

    Raises:
      CommandFailed: it was refused, has failed or does not end, or control does not answer.
    """
    run(path, f"{action} {name}", "POST", f"/admin/models/{name}/{action}")


def run(path: Path, what: str, method: str, route: str, body: dict[str, Any] | None = None) -> None:
    """Begin an operation and show how far it is, until it is over.

    Args:
      path: of control's Unix socket.
      what: is asked for, in words.
      method: of HTTP.
      route: that begins it.
      body: of the request.

    Raises:
      CommandFailed: it was refused, has failed or does not end, or control does not answer.
    """
    # Here: every command of `triolet` imports this file, and its workers need neither.
    import httpx2

    from ..http_trust import verify_for

    began, shown = time.monotonic(), ""
    transport = httpx2.HTTPTransport(uds=str(path), verify=verify_for(LOCAL_URL))
    with httpx2.Client(transport=transport, base_url=LOCAL_URL, timeout=ANSWER_TIMEOUT_S) as client:
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
                    f"{what} is not over after {WAIT_S:.0f} s ({shown}); it goes on, and "
                    "`triolet model ps` shows how far it is"
                )
            time.sleep(POLL_S)
            try:
                operation = _ask(client, "GET", f"/admin/operations/{operation['id']}")
                answered = time.monotonic()
            except ControlAway:
                if time.monotonic() - answered >= AWAY_S:
                    raise


def _ask(
    client: httpx2.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    from httpx2 import HTTPError

    try:
        answer = client.request(method, path, json=body)
    except HTTPError as error:
        raise ControlAway(
            f"control does not answer {method} {path}: {error}; only a fleet that serves models "
            "by names (`triolet serve NAME=MODEL …`) has it. There it is started again when it "
            "ends, and what it had begun goes on: try again in a minute; the fleet's log says why "
            "it ended"
        ) from error
    body = answer.json()
    if answer.is_error:
        raise CommandFailed(body["error"]["message"])
    return dict(body)
