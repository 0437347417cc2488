"""`triolet model`: the versions of models in the store of this machine, and running models.

What a program may want (a digest, a manifest) goes to stdout alone; all other text to stderr.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer

from triolet.config import WeightFormat
from triolet.errors import ConfigError, StoreError

from ..audit.events import Action
from ..exit_codes import CommandFailed
from ..settings.sources import SettingSources  # noqa: TC001 (with_settings reads annotations)
from .options import AuditOption, FleetPortOption, with_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from store.layout import ModelStore
    from store.measured import Golden, MeasuredCapacity
    from store.sources import Source

model_app = typer.Typer(
    help="Models: versions in the store, and those of a running fleet.", no_args_is_help=True
)

StoreOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Model store.", show_default="yours"),
]
RefArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="REF", help="chat, chat@stable, chat:v1 or chat@sha256:…")
]
ExpectOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DIGEST", help="Move it only if it is this version now."),
]
LimitOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Evict versions that a registry has, the longest unused first, beyond so much: 50GiB.",
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="For programs.")]


@model_app.command("import")
def import_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or GGUF file, or demo.")],
    name: Annotated[str, typer.Option(help="Of the model in the store.")],
    tag: Annotated[str | None, typer.Option(help="For this version, such as v1.")] = None,
    sampling: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON: defaults that replace the model's own."),
    ] = None,
    weights: Annotated[
        WeightFormat, typer.Option(help="What workers keep its weights in.")
    ] = WeightFormat.AUTO,
    link: Annotated[
        bool, typer.Option("--link", help="Share files with MODEL where they cannot be cloned.")
    ] = False,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Check a model, keep it as a version, and print the version's digest."""
    from triolet.units import show_size

    from ..audit.recording import recorded
    from ..models.importing import WantedImport, import_model
    from ..models.stored import store_of

    wanted = WantedImport(model, name, tag, sampling, weights, link)
    with (
        recorded(Action.MODEL_IMPORT, name, folder=audit) as running,
        byte_bar(name) as on_bytes,
    ):
        found = import_model(store_of(store), wanted, on_bytes)
        running.after = found.digest
        running.counts = {str(way): size for way, size in found.num_bytes.items()}
    ways = [f"{show_size(size)} {way}" for way, size in found.num_bytes.items() if size]
    say(f"{name}@{found.digest}: {', '.join(ways)}")
    if found.others:
        say(f"not part of the version: {', '.join(found.others)}")
    typer.echo(found.digest)


@model_app.command("list")
def list_all(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show all versions with their tags and aliases, and what was evicted."""
    from store.aliases import Aliases
    from store.sources import Sources as Places
    from triolet.units import show_size

    opened = opened_store(store)
    pointers = Aliases(opened).all()
    rows: list[dict[str, Any]] = []
    for entry in opened.entries():
        manifest = opened.manifest(entry.digest)
        named = [
            str(pointer)
            for pointer, digest in pointers.items()
            if (pointer.name, digest) == (entry.name, entry.digest)
        ]
        size = sum(layer.size for layer in manifest.blobs)
        rows.append(
            {"name": entry.name, "digest": entry.digest, "size_bytes": size, "named": named}
        )
    evicted = Places(opened).evicted()
    if as_json:
        rows += [
            {"name": one.name, "digest": one.digest, "evicted_to": one.location} for one in evicted
        ]
        typer.echo(msgspec.json.encode(rows).decode())
        return
    for row in rows:
        shown, names = show_size(row["size_bytes"]), ", ".join(row["named"]) or "-"
        # Whole digests, however narrow the terminal: they are there to be copied.
        typer.echo(f"{row['name']}@{row['digest']}  {shown:>9}  {names}")
    for one in evicted:
        typer.echo(f"{one.name}@{one.digest}    evicted  {one.location}")


@model_app.command("show")
def show(ref: RefArgument, store: StoreOption = None) -> None:
    """Print the whole manifest of a version as JSON; what is known about it goes to stderr."""
    from store.aliases import Aliases
    from store.manifest import MAX_MANIFEST_BYTES
    from store.reference import parse_reference
    from store.signatures import signatures_of

    reference, opened = parse_reference(ref), opened_store(store)
    digest = Aliases(opened).resolve(reference)
    opened.manifest(digest)
    say(f"{reference.name}@{digest}")
    signed = signatures_of(opened, digest)
    say_signers(signed.keys)
    for fault in signed.faults:
        say(fault)
    for line in _measured_lines(opened, digest):
        say(line)
    content = opened.read(digest, MAX_MANIFEST_BYTES)
    typer.echo(msgspec.json.format(content, indent=2).decode())


@model_app.command("verify")
def verify_(
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="One version.", show_default="all")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Read every byte of one version or all, compare digests, and check signatures."""
    from store.aliases import Aliases
    from store.reference import parse_reference
    from store.verify import verify
    from triolet.units import show_size

    opened = opened_store(store)
    aliases, entries = Aliases(opened), opened.entries()
    faults = []
    if ref is None:
        known = {(entry.name, entry.digest) for entry in entries}
        faults = [
            f"{pointer} is {digest}, which is no version of {pointer.name}; `triolet model rm "
            f"{pointer}`, or import the model again"
            for pointer, digest in aliases.all().items()
            if (pointer.name, digest) not in known
        ]
    else:
        reference = parse_reference(ref)
        meant = (reference.name, aliases.resolve(reference))
        entries = tuple(entry for entry in entries if (entry.name, entry.digest) == meant)
    found = verify(opened, entries)
    for version, keys in found.signed.items():
        if keys:
            say(f"{version} is signed by {', '.join(keys)}")
    for fault in (*faults, *found.faults):
        say(fault)
    counted = (
        f"{found.num_versions} versions, {found.num_blobs} blobs, {show_size(found.num_bytes)}"
    )
    if num_faults := len(faults) + len(found.faults):
        raise CommandFailed(f"{num_faults} faults in {counted}; each is named above")
    say(f"{counted}: all as their digests say")


@model_app.command("tag")
def tag(
    ref: RefArgument,
    name: Annotated[str, typer.Argument(metavar="TAG", help="v1, or chat:v1.")],
    expect: ExpectOption = None,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Give a version a tag. One that is there already moves only with --expect."""
    from store.aliases import ABSENT, Aliases
    from store.reference import PointerKind, parse_reference, tag_of

    from ..audit.recording import recorded

    reference, aliases = parse_reference(ref), Aliases(opened_store(store))
    pointer = parse_reference(name).pointer if ":" in name else tag_of(reference.name, name)
    if pointer is None or pointer.kind is not PointerKind.TAG or pointer.name != reference.name:
        raise StoreError(f"{name!r} is no tag of {reference.name}; allowed: {reference.name}:TAG")
    digest = aliases.resolve(reference)
    now = aliases.all().get(pointer, ABSENT)
    if expect is None and now not in (ABSENT, digest):
        raise StoreError(
            f"{pointer} is {now} and stays; give another tag, or move it with --expect {now}"
        )
    before = None if now == ABSENT else now
    with recorded(Action.MODEL_TAG, str(pointer), folder=audit, before=before, after=digest):
        aliases.move(pointer, digest, expect=now if expect is None else expect)
    say(f"{pointer} is {digest}")


@model_app.command("alias")
def alias(
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="chat@stable.")],
    ref: Annotated[
        str | None, typer.Argument(metavar="REF", help="Where to.", show_default="show its moves")
    ] = None,
    expect: ExpectOption = None,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Point an alias to a version, or show where it has pointed."""
    from store.aliases import Aliases
    from store.reference import PointerKind, parse_reference

    from ..audit.recording import recorded

    pointer, aliases = parse_reference(name).pointer, Aliases(opened_store(store))
    if pointer is None or pointer.kind is not PointerKind.ALIAS:
        raise StoreError(f"{name!r} is no alias; allowed: NAME@ALIAS, such as chat@stable")
    if ref is None:
        if expect is not None:
            raise ConfigError("--expect is given without REF; name the version to move to")
        moves = aliases.moves(pointer)
        if not moves:
            raise StoreError(f"there is no {pointer}, and never was; name a REF to make it")
        for move in moves:
            at = datetime.fromtimestamp(move.at, UTC).isoformat(timespec="seconds")
            typer.echo(f"{at}  {move.old or '-'} -> {move.new or '-'}")
        return
    reference = parse_reference(ref)
    if reference.name != pointer.name:
        raise StoreError(
            f"{ref} is a version of {reference.name}, {pointer} an alias of {pointer.name}; import "
            f"the model as {pointer.name} too, which keeps its blobs once"
        )
    digest = aliases.resolve(reference)
    with recorded(Action.MODEL_ALIAS, str(pointer), folder=audit, after=digest) as running:
        old = aliases.move(pointer, digest, expect)
        running.before = old or None
    say(f"{pointer} is {digest}, it was {old or 'not there'}")


@model_app.command("rm")
def remove_(ref: RefArgument, store: StoreOption = None, audit: AuditOption = None) -> None:
    """Remove a tag or alias, and the version unless another one names it. `gc` frees the disk."""
    from store.aliases import Aliases
    from store.collect import remove
    from store.reference import parse_reference

    from ..audit.recording import recorded

    reference, opened = parse_reference(ref), opened_store(store)
    with (
        opened.writing() as writer,
        recorded(Action.MODEL_REMOVE, ref, folder=audit) as running,
    ):
        gone = remove(writer, Aliases(opened), reference)
        running.before = gone.digest
    if gone.pointer is not None:
        say(f"{gone.pointer} is removed")
    if gone.digest is None:
        say("its version has another tag or alias, and stays")
    else:
        say(f"{reference.name}@{gone.digest} is removed; `triolet model gc` frees its disk space")


@model_app.command("gc")
@with_settings()
def collect_(
    sources: SettingSources,
    store_limit: LimitOption = None,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Remove blobs that no version names and, without --store, packed weights; not what is used."""
    from store.aliases import Aliases
    from store.collect import collect
    from store.evict import make_room
    from store.registry.copies import Copies
    from triolet.units import show_size

    from ..audit.recording import recorded
    from ..models.stored import store_of

    folder, limit = limited_store(sources, "model gc", store, store_limit)
    # --store names one folder: what is elsewhere stays then.
    has_packed = store is None and remove_packed(sources)
    if has_packed and folder is None and not store_of(None).is_there:
        return
    opened = opened_store(folder)
    with (
        opened.writing() as writer,
        recorded(Action.MODEL_GC, str(opened.root), folder=audit) as running,
    ):
        found = collect(writer)
        counts = {"blobs": found.num_blobs, "bytes": found.num_bytes}
        if limit is not None:
            evicted = make_room(writer, Aliases(opened), limit, Copies(opened).has)
            counts |= {"evicted": len(evicted.versions), "evicted_bytes": evicted.freed_bytes}
            note_evicted(evicted.versions, audit)
        running.counts = counts
    say(f"{found.num_blobs} blobs removed, {show_size(found.num_bytes)}")
    for digest in found.in_use:
        say(f"{digest} has been removed and stays while it is served")
    if limit is None:
        return
    say(f"{show_size(evicted.freed_bytes)} evicted, {show_size(evicted.left_bytes)} left")
    if evicted.left_bytes > limit:
        raise CommandFailed(
            f"{opened.root} takes {show_size(evicted.left_bytes)}, more than the limit of "
            f"{show_size(limit)}, and no more can go: {evicted.reasons}; raise the limit, or "
            "remove versions with `triolet model rm`"
        )


@model_app.command("ps")
def show_processes(port: FleetPortOption = None, as_json: JsonOption = False) -> None:
    """Show the models of a running fleet with their workers."""
    from .model_processes import run_ps

    run_ps(port, as_json=as_json)


@contextmanager
def byte_bar(words: str) -> Iterator[Callable[[int, int], None]]:
    """Give what is told of each some bytes more, and of how many; show them on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    screen = Console(stderr=True)
    columns = (TextColumn(words), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda count, total: bar.update(task, advance=count, total=total)


def remove_packed(sources: SettingSources) -> bool:
    """Remove the packed weights that no worker uses, and return whether there were any at all.

    Raises:
      CommandFailed: one cannot be removed.
    """
    from store.packed_weights import collect_packed, packed_folder
    from triolet.units import show_size

    settings, has_any = sources.settings(), False
    named = {one.engine.snapshots.folder for one in (settings.prefill, settings.decode)}
    for folder in map(packed_folder, named):
        try:
            found = collect_packed(folder)
        except OSError as error:
            raise CommandFailed(
                f"packed weights in {folder} cannot be removed: {error.strerror or error}; remove "
                "the folder as the user that owns it"
            ) from error
        if found.num_files or found.num_in_use:
            has_any = True
            say(
                f"packed weights: {found.num_files} removed, {show_size(found.num_bytes)}; "
                f"{found.num_in_use} in use, which stay"
            )
    return has_any


def note_evicted(versions: Sequence[Source], audit: Path | None) -> None:
    """Write which versions went, to the audit log too, and how they come back."""
    from ..audit.recording import record

    for one in versions:
        say(f"{one.name}@{one.digest} is evicted; `{one.command}` brings it back")
    for one in versions:
        version = f"{one.name}@{one.digest}"
        record(Action.MODEL_REMOVE, version, folder=audit, before=one.digest)


def limited_store(
    sources: SettingSources, command: str, store: Path | None, store_limit: str | None
) -> tuple[Path | None, int | None]:
    """Return the folder of the store and its limit in bytes, of options or else of settings.

    Args:
      sources: of the settings.
      command: that reads them, for errors.
      store: of `--store`.
      store_limit: of `--store-limit`.

    Raises:
      ConfigError: one of them cannot be, or is of no use for the command.
    """
    from triolet.units import parse_size

    sources.refuse_for_store(command)
    settings = sources.settings()
    named = settings.fleet.store
    folder = Path(named) if store is None and named is not None else store
    return folder, settings.store.limit_bytes if store_limit is None else parse_size(store_limit)


def opened_store(store: Path | None) -> ModelStore:
    """Return the store that an option names, or this user's.

    Raises:
      StoreError: it is not there.
    """
    from ..models.stored import store_of

    return store_of(store).require()


def _measured_lines(store: ModelStore, digest: str) -> list[str]:
    """Return a line for each measurement of a version that a store has, or that is damaged."""
    from store.measured import Golden, measured_of
    from store.referrers import CAPACITY_TYPE, GOLDEN_TYPE

    lines = []
    for kind in (GOLDEN_TYPE, CAPACITY_TYPE):
        for one in measured_of(store, digest, kind):
            if isinstance(one, str):
                lines.append(one)
            elif isinstance(one.said, Golden):
                lines.append(golden_line(one.said))
            else:
                lines.append(capacity_line(one.said))
    return lines


def golden_line(one: Golden) -> str:
    """Return what is shown of golden tokens."""
    tokens = ", ".join(str(list(prompt.golden_ids)) for prompt in one.prompts)
    return f"golden tokens for {one.key}: {tokens}"


def capacity_line(one: MeasuredCapacity) -> str:
    """Return what is shown of a capacity."""
    return (
        f"capacity for {one.key}: {one.prefill_tokens_per_s:.0f} prompt tokens/s; a decode step "
        f"takes {one.step_s * 1e3:.2f} ms, {one.row_s * 1e3:.3f} ms for each row and "
        f"{one.kv_token_s * 1e6:.3f} µs for each token that a row attends to; loaded in "
        f"{one.load_s:.2f} s"
    )


def say_signers(keys: Sequence[str]) -> None:
    """Write by which keys a version is signed."""
    say(f"signed by {', '.join(keys)}" if keys else "not signed")


def say(words: str) -> None:
    """Write a line for people."""
    typer.echo(words, err=True)
