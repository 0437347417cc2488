"""`triolet model key`, `sign` and `require`: signatures of versions, and where they are needed."""

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
    """Print the id of a key for signatures, which is the public key; make the file if there is
    none."""
    from store.signatures import key_id, make_key, read_key

    if not file.exists():
        make_key(file)
        say(f"{file} is a new private key; keep it, and keep it from others")
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
    # A signature says that this is the model: a damaged one is not signed.
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
            help="chat@stable, chat:v1, or chat for every tag and alias and for serving.",
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Ids of keys, one of which must have signed."),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Require no signature any more.")] = False,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Require signatures of what a name points to; without KEY, print what is required."""
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
        else f"{reference} requires no signature any more"
    )
