"""`triolet model import|list|show|verify|tag|alias|rm|gc|ps`: the model store of this machine.

Digests, manifests and JSON go to stdout, for programs; all other text goes to stderr.
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
    help="Model versions in the store, and models of a running fleet.", no_args_is_help=True
)

StoreOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", help="Directory of the model store.", show_default="yours"
    ),
]
RefArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="REF", help="chat, chat@stable, chat:v1 or chat@sha256:…")
]
ExpectOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DIGEST", help="Move it only if it points to this version now."),
]
LimitOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Size limit, such as 50GiB: evict least recently used versions that a registry has.",
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@model_app.command("import")
def import_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, GGUF file or demo.")],
    name: Annotated[str, typer.Option(help="Name of the model in the store.")],
    tag: Annotated[str | None, typer.Option(help="Tag of this version, such as v1.")] = None,
    sampling: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON with sampling defaults that replace the model's."),
    ] = None,
    weights: Annotated[
        WeightFormat, typer.Option(help="Format in which workers keep the weights in memory.")
    ] = WeightFormat.AUTO,
    link: Annotated[
        bool, typer.Option("--link", help="Hard-link files of MODEL that cannot be cloned.")
    ] = False,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Check a model, store it as a version, and print the version's digest."""
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
    """Show all versions with their tags and aliases, and evicted versions."""
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
        # Never shorten digests to the terminal's width: users copy them.
        typer.echo(f"{row['name']}@{row['digest']}  {shown:>9}  {names}")
    for one in evicted:
        typer.echo(f"{one.name}@{one.digest}    evicted  {one.location}")


@model_app.command("show")
def show(ref: RefArgument, store: StoreOption = None) -> None:
    """Print the manifest of a version as JSON; signers and measurements go to stderr."""
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
    """Read every byte of one version or of all, check digests and signatures."""
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
            f"{pointer} points to {digest}, which is not a version of {pointer.name}; run `triolet "
            f"model rm {pointer}`, or import the model again"
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
        raise CommandFailed(f"{num_faults} faults in {counted}; each is listed above")
    say(f"{counted}: all match their digests")


@model_app.command("tag")
def tag(
    ref: RefArgument,
    name: Annotated[str, typer.Argument(metavar="TAG", help="v1, or chat:v1.")],
    expect: ExpectOption = None,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Tag a version. An existing tag moves only with --expect."""
    from store.aliases import ABSENT, Aliases
    from store.reference import PointerKind, parse_reference, tag_of

    from ..audit.recording import recorded

    reference, aliases = parse_reference(ref), Aliases(opened_store(store))
    pointer = parse_reference(name).pointer if ":" in name else tag_of(reference.name, name)
    if pointer is None or pointer.kind is not PointerKind.TAG or pointer.name != reference.name:
        raise StoreError(
            f"{name!r} is not a tag of {reference.name}; allowed: {reference.name}:TAG"
        )
    digest = aliases.resolve(reference)
    now = aliases.all().get(pointer, ABSENT)
    if expect is None and now not in (ABSENT, digest):
        raise StoreError(
            f"{pointer} is already {now}; choose another tag, or move this one with --expect {now}"
        )
    before = None if now == ABSENT else now
    with recorded(Action.MODEL_TAG, str(pointer), folder=audit, before=before, after=digest):
        aliases.move(pointer, digest, expect=now if expect is None else expect)
    say(f"{pointer} is {digest}")


@model_app.command("alias")
def alias(
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="chat@stable.")],
    ref: Annotated[
        str | None,
        typer.Argument(metavar="REF", help="Version to point to.", show_default="show its history"),
    ] = None,
    expect: ExpectOption = None,
    store: StoreOption = None,
    audit: AuditOption = None,
) -> None:
    """Point an alias to a version, or show its history."""
    from store.aliases import Aliases
    from store.reference import PointerKind, parse_reference

    from ..audit.recording import recorded

    pointer, aliases = parse_reference(name).pointer, Aliases(opened_store(store))
    if pointer is None or pointer.kind is not PointerKind.ALIAS:
        raise StoreError(f"{name!r} is not an alias; allowed: NAME@ALIAS, such as chat@stable")
    if ref is None:
        if expect is not None:
            raise ConfigError("--expect is given without REF; name the version to move to")
        moves = aliases.moves(pointer)
        if not moves:
            raise StoreError(f"{pointer} has never existed; give a REF to create it")
        for move in moves:
            at = datetime.fromtimestamp(move.at, UTC).isoformat(timespec="seconds")
            typer.echo(f"{at}  {move.old or '-'} -> {move.new or '-'}")
        return
    reference = parse_reference(ref)
    if reference.name != pointer.name:
        raise StoreError(
            f"{ref} is a version of {reference.name}, but {pointer} is an alias of {pointer.name}; "
            f"import the model as {pointer.name} too (its blobs are stored once)"
        )
    digest = aliases.resolve(reference)
    with recorded(Action.MODEL_ALIAS, str(pointer), folder=audit, after=digest) as running:
        old = aliases.move(pointer, digest, expect)
        running.before = old or None
    say(f"{pointer} is {digest} (before: {old or 'none'})")


@model_app.command("rm")
def remove_(ref: RefArgument, store: StoreOption = None, audit: AuditOption = None) -> None:
    """Remove a tag or alias, and its version unless another one names it. `gc` frees the disk."""
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
        say("its version is kept: another tag or alias names it")
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
    """Remove unused blobs and, without --store, unused packed weights."""
    from store.aliases import Aliases
    from store.collect import collect
    from store.evict import make_room
    from store.registry.copies import Copies
    from triolet.units import show_size

    from ..audit.recording import recorded
    from ..models.stored import store_of

    folder, limit = limited_store(sources, "model gc", store, store_limit)
    # --store selects one directory, so packed weights elsewhere stay.
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
        say(f"{digest} is removed, but its blobs stay on disk while it is served")
    if limit is None:
        return
    say(f"{show_size(evicted.freed_bytes)} evicted, {show_size(evicted.left_bytes)} left")
    if evicted.left_bytes > limit:
        raise CommandFailed(
            f"{opened.root} takes {show_size(evicted.left_bytes)}, more than the limit of "
            f"{show_size(limit)}, and nothing else can be evicted: {evicted.reasons}; raise the "
            "limit, or remove versions with `triolet model rm`"
        )


@model_app.command("ps")
def show_processes(port: FleetPortOption = None, as_json: JsonOption = False) -> None:
    """Show the models of a running fleet with their workers."""
    from .model_processes import run_ps

    run_ps(port, as_json=as_json)


@contextmanager
def byte_bar(words: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal. Yields a callback for (new bytes, total bytes)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    screen = Console(stderr=True)
    columns = (TextColumn(words), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda count, total: bar.update(task, advance=count, total=total)


def remove_packed(sources: SettingSources) -> bool:
    """Remove packed weights that no worker uses. Return whether any packed weights existed.

    Raises:
      CommandFailed: a file cannot be removed.
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
                f"{found.num_in_use} kept (in use)"
            )
    return has_any


def note_evicted(versions: Sequence[Source], audit: Path | None) -> None:
    """Print evicted versions with the command that restores each; record them in the audit log."""
    from ..audit.recording import record

    for one in versions:
        say(f"{one.name}@{one.digest} is evicted; `{one.command}` restores it")
    for one in versions:
        version = f"{one.name}@{one.digest}"
        record(Action.MODEL_REMOVE, version, folder=audit, before=one.digest)


def limited_store(
    sources: SettingSources, command: str, store: Path | None, store_limit: str | None
) -> tuple[Path | None, int | None]:
    """Return the directory of the store and its limit in bytes, from options or else settings.

    Args:
      sources: the settings.
      command: name of the command, for errors.
      store: value of `--store`.
      store_limit: value of `--store-limit`.

    Raises:
      ConfigError: a value is invalid, or the command does not use the setting.
    """
    from triolet.units import parse_size

    sources.refuse_for_store(command)
    settings = sources.settings()
    named = settings.fleet.store
    folder = Path(named) if store is None and named is not None else store
    return folder, settings.store.limit_bytes if store_limit is None else parse_size(store_limit)


def opened_store(store: Path | None) -> ModelStore:
    """Return the store given by `--store`, or this user's.

    Raises:
      StoreError: it does not exist.
    """
    from ..models.stored import store_of

    return store_of(store).require()


def _measured_lines(store: ModelStore, digest: str) -> list[str]:
    """Return a line for each stored measurement of a version, damaged ones included."""
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
    """Return golden tokens as a line of text."""
    tokens = ", ".join(str(list(prompt.golden_ids)) for prompt in one.prompts)
    return f"golden tokens for {one.key}: {tokens}"


def capacity_line(one: MeasuredCapacity) -> str:
    """Return a measured capacity as a line of text."""
    return (
        f"capacity for {one.key}: {one.prefill_tokens_per_s:.0f} prompt tokens/s; a decode step "
        f"takes {one.step_s * 1e3:.2f} ms, {one.row_s * 1e3:.3f} ms for each row and "
        f"{one.kv_token_s * 1e6:.3f} µs for each KV token that a row attends to; loaded in "
        f"{one.load_s:.2f} s"
    )


def say_signers(keys: Sequence[str]) -> None:
    """Print the keys that signed a version."""
    say(f"signed by {', '.join(keys)}" if keys else "not signed")


def say(words: str) -> None:
    """Print a line to stderr."""
    typer.echo(words, err=True)
