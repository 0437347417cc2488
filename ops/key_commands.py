"""`triolet keys`: keys for links between machines, and for clients."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads annotations)
from typing import Annotated

import typer

from triolet.api_keys import key_line, new_key

keys_app = typer.Typer(
    help="Keys for links between machines, and for clients.", no_args_is_help=True
)


@keys_app.command("make")
def make_keys(directory: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Write a new key pair and an empty list of those who may connect."""
    from transport.zmq_curve import make_keys as make

    public = make(directory)
    typer.echo(f"{directory}: new keys; others let this process in by its public key:")
    typer.echo(public.decode())


@keys_app.command("issue")
def issue_key(tenant: Annotated[str, typer.Argument(metavar="TENANT")]) -> None:
    """Make an API key, and the line that lets it in, for the file of --api-keys."""
    key = new_key()
    typer.echo(key_line(tenant, key))
    typer.echo(f"the key itself, which is stored nowhere: {key}", err=True)
