"""`triolet model push` and `pull`: copies versions to and from OCI registries."""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ..audit.events import Action
from ..settings.sources import SettingSources  # noqa: TC001 (with_settings reads annotations)
from .model_commands import (
    LimitOption,
    RefArgument,
    StoreOption,
    byte_bar,
    limited_store,
    note_evicted,
    opened_store,
    say,
    say_signers,
)
from .options import AuditOption, with_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from store.registry.client import Registry
    from store.registry.location import Location
    from store.registry.pull import Pulled, WantedVersion
    from store.sources import Source

registry_app = typer.Typer()

LocationArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="LOCATION", help="oci://HOST[:PORT]/REPOSITORY:TAG or …@sha256:…")
]
UsernameOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="User name at the registry; the password is read from stdin."
    ),
]
InsecureOption: TypeAlias = Annotated[
    bool, typer.Option("--insecure", help="Allow HTTP without TLS to other machines.")
]


@registry_app.command("push")
def push_(
    ref: RefArgument,
    location: LocationArgument,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST", help="Move the registry's tag only if it points to this version now."
        ),
    ] = None,
    username: UsernameOption = None,
    insecure: InsecureOption = False,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Upload a version to a registry and print its digest. Skips existing blobs."""
    from store.aliases import Aliases
    from store.reference import parse_reference
    from store.registry.location import parse_location
    from store.registry.push import push
    from triolet.units import show_size

    from ..audit.recording import recorded

    reference, place, opened = parse_reference(ref), parse_location(location), opened_store(store)
    digest = Aliases(opened).resolve(reference)
    with (
        _registry(place, username, is_insecure=insecure) as registry,
        recorded(Action.MODEL_PUSH, str(place), folder=audit, after=digest) as running,
        byte_bar(str(reference)) as on_bytes,
    ):
        found = push(opened, registry, reference, digest, expect, on_bytes)
        running.counts = {"blobs": found.num_sent, "bytes": found.sent_bytes}
    say(
        f"{place}: {show_size(found.sent_bytes)} uploaded in {found.num_sent} blobs, "
        f"{show_size(found.total_bytes - found.sent_bytes)} already there, "
        f"{found.num_referrers} signatures and measurements uploaded"
    )
    typer.echo(digest)


@registry_app.command("pull")
@with_settings()
def pull_(
    sources: SettingSources,
    location: LocationArgument,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model in the store.", show_default="the repository's last part"
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Tag of this version.", show_default="the registry's")
    ] = None,
    store_limit: LimitOption = None,
    username: UsernameOption = None,
    insecure: InsecureOption = False,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Download a version from a registry and print its digest. Resumes an interrupted download."""
    from store.reference import require_name, tag_of
    from store.registry.location import parse_location
    from store.registry.pull import WantedVersion, pull

    from ..audit.recording import recorded
    from ..models.stored import store_of

    place = parse_location(location)
    model = require_name(place.model_name if name is None else name)
    label = place.tag if tag is None else tag
    folder, limit = limited_store(sources, "model pull", store, store_limit)
    wanted = WantedVersion(model, None if label is None else tag_of(model, label), limit)
    with (
        _registry(place, username, is_insecure=insecure) as registry,
        recorded(Action.MODEL_PULL, f"{place} as {wanted.tag or model}", folder=audit) as running,
        byte_bar(model) as on_bytes,
    ):

        def on_evicted(versions: list[Source]) -> None:
            running.counts = {"evicted": len(versions)}
            note_evicted(versions, audit)

        found = pull(store_of(folder), registry, wanted, on_bytes, on_evicted)
        running.after = found.digest
        running.counts = {**(running.counts or {}), "bytes": found.fetched_bytes}
    _say_pulled(found, wanted)


def _say_pulled(found: Pulled, wanted: WantedVersion) -> None:
    from triolet.units import show_size

    say(
        f"{wanted.name}@{found.digest}: {show_size(found.fetched_bytes)} downloaded, "
        f"{show_size(found.total_bytes - found.fetched_bytes)} already here"
    )
    say_signers(found.signers)
    for note in found.notes:
        say(note)
    if wanted.tag is not None:
        say(f"{wanted.tag} is {found.digest}")
    typer.echo(found.digest)


@contextmanager
def _registry(place: Location, username: str | None, *, is_insecure: bool) -> Iterator[Registry]:
    from store.registry.client import Registry
    from store.registry.credentials import credentials_for

    password = None if username is None else _password(username, place.host)
    credentials = credentials_for(place.host, username, password)
    with closing(Registry(place, credentials, is_insecure=is_insecure)) as registry:
        yield registry


def _password(username: str, host: str) -> bytes:
    """Read a password from stdin, without echo on a terminal."""
    from getpass import getpass

    from store.registry.credentials import MAX_PASSWORD_BYTES

    if sys.stdin.isatty():
        return getpass(f"Password of {username} at {host}: ").encode()
    return sys.stdin.buffer.readline(MAX_PASSWORD_BYTES + 2)
