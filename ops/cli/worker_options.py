"""From a worker's options to its configuration. Knows no option's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.config import WorkerConfig

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.config import EngineConfig, LinkConfig


def worker_config(
    name: str,
    model: Path | None,
    control: str,
    kv: str | None,
    engine: EngineConfig,
    link: LinkConfig,
    curve: Path | None,
    drain_timeout_s: float,
) -> WorkerConfig:
    """Return what a worker's command line means. Checks the model, before torch is loaded.

    Raises:
      ConfigError: it cannot be served so.
    """
    from ..model_directory import check_start  # loads what only a role needs

    return WorkerConfig(
        name=name,
        model_dir=str(check_start(model, engine).path),
        control_address=control,
        kv_address=kv,
        engine=engine,
        link=link,
        curve_dir=None if curve is None else str(curve),
        drain_timeout_s=drain_timeout_s,
    )
