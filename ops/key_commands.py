"""`triolet keys`: keys for tcp links."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads annotations)
from typing import Annotated

import typer

keys_app = typer.Typer(help="Keys for tcp links between processes.", no_args_is_help=True)


@keys_app.command("make")
def make_keys(directory: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Write a new key pair, and folders for the keys of other processes."""
    from transport.zmq_curve import make_keys as make

    public = make(directory)
    typer.echo(f"{directory}: new keys; others let this process in by its public key:")
    typer.echo(public.decode())
