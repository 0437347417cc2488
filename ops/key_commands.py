"""`triolet keys`: keys for links between machines."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads annotations)
from typing import Annotated

import typer

keys_app = typer.Typer(help="Keys for links between machines.", no_args_is_help=True)


@keys_app.command("make")
def make_keys(directory: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Write a new key pair and an empty list of those who may connect."""
    from transport.zmq_curve import make_keys as make

    public = make(directory)
    typer.echo(f"{directory}: new keys; others let this process in by its public key:")
    typer.echo(public.decode())
