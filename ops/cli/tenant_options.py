"""The options that say whose tenants there are and who counts what they use.

Defaults and reasons are in triolet/config/server.py and triolet/config/scheduling.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from triolet.config import AT, QuotaConfig, TenantsConfig
from triolet.errors import ConfigError
from triolet.tenants_form import read_tenants

_option = partial(typer.Option, rich_help_panel="Server")

TenantsOption: TypeAlias = Annotated[
    Path | None, _option(help="File of tenants (see `triolet tenant`).", show_default="none")
]
LimitsOption: TypeAlias = Annotated[
    str,
    _option(
        metavar="WHERE",
        help="Where tenants' limits are counted: memory, redis://HOST[:PORT] that several servers "
        "share, or @FILE with such a URL in it.",
    ),
]
LimitsTimeoutOption: TypeAlias = Annotated[
    float,
    _option(
        min=0.001,
        max=QuotaConfig().lease_s,
        help="Seconds that Redis may take to answer; a request waits for it.",
    ),
]
SpendFileOption: TypeAlias = Annotated[
    Path | None,
    _option(help="Keeps what tenants spent, with memory.", show_default="beside --tenants"),
]


def tenants_config(
    file: Path | None, limits: str, limits_timeout_s: float, spend_file: Path | None
) -> TenantsConfig:
    """Return whose tenants they are, and who keeps the account of them."""
    if limits.startswith(AT):
        limits = f"{AT}{Path(limits[1:]).absolute()}"
    spend = None if spend_file is None else str(spend_file.absolute())
    quotas = QuotaConfig(limits, spend_file=spend, call_timeout_s=limits_timeout_s)
    return TenantsConfig(None if file is None else str(file.absolute()), quotas=quotas)


def require_tenants(config: TenantsConfig) -> None:
    """Look whether the file of tenants, if there is one, can be read and means something.

    Raises:
      ConfigError: it cannot, in the words of the server.
    """
    if config.file is None:
        return
    try:
        with Path(config.file).open("rb") as file:
            content = file.read(config.max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"the file of tenants cannot be read: {error}") from None
    if len(content) <= config.max_bytes:
        read_tenants(content, config.file)
