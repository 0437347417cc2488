"""`triolet model key`, `sign` and `require`: signs versions and sets which names require it."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (typer reads annotations)
from typing import Annotated

import typer

from triolet.errors import ConfigError, StoreError

from ..audit.events import Action
from .model_commands import RefArgument, StoreOption, opened_store, say
from .options import AuditOption  # noqa: TC001 (typer reads annotations)

signature_app = typer.Typer()


@signature_app.command("key")
def key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Private key (Ed25519, PEM).")],
) -> None:
    """Print the id (the public key) of a signing key. Create the file if it does not exist."""
    from store.signatures import key_id, make_key, read_key

    if not file.exists():
        make_key(file)
        say(f"{file} is a new private key; keep it safe and secret")
    typer.echo(key_id(read_key(file)))


@signature_app.command("sign")
def sign_(
    ref: RefArgument,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key (Ed25519, PEM).")],
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Check every byte of a version, sign it, and print the id of the key."""
    from store.aliases import Aliases
    from store.reference import parse_reference
    from store.signatures import key_id, read_key, sign
    from store.verify import verify

    from ..audit.recording import recorded

    reference, opened, private = parse_reference(ref), opened_store(store), read_key(key)
    digest = Aliases(opened).resolve(reference)
    meant = [one for one in opened.entries() if one[:2] == (reference.name, digest)]
    # A signature vouches for the content, so never sign a damaged version.
    faults = verify(opened, meant).faults
    if faults:
        raise StoreError(f"{ref} is not signed: {'; '.join(faults)}")
    with (
        opened.writing() as writer,
        recorded(Action.MODEL_SIGN, str(reference), folder=audit, after=digest),
    ):
        sign(writer, digest, private)
    say(f"{reference.name}@{digest} is signed")
    typer.echo(key_id(private))


@signature_app.command("require")
def require(
    scope: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="chat@stable, chat:v1, or chat for all its tags and aliases and for serving.",
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Key ids; one of these keys must have signed."),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Stop requiring signatures.")] = False,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Require signatures for a name; without KEY, print the required keys."""
    from store.aliases import Aliases
    from store.reference import parse_reference
    from store.signatures import require_key_id

    from ..audit.events import digest
    from ..audit.recording import recorded

    reference, aliases = parse_reference(scope), Aliases(opened_store(store))
    before = aliases.required_keys(reference)
    if key and none:
        raise ConfigError("KEY and --none are both given; give one of them")
    if not key and not none:
        for one in before:
            typer.echo(one)
        if not before:
            say(f"{reference} requires no signature")
        return
    keys = tuple(sorted({require_key_id(one) for one in key or ()}))
    states = ["\n".join(one).encode() for one in (before, keys)]
    with recorded(
        Action.MODEL_REQUIRE,
        str(reference),
        folder=audit,
        before=digest(states[0]),
        after=digest(states[1]),
    ):
        aliases.require_keys(reference, keys)
    say(
        f"{reference} requires a signature by {' or '.join(keys)}"
        if keys
        else f"{reference} no longer requires a signature"
    )
