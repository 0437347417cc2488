"""The options of admission and overload, the configuration that they become, and back.

Defaults and reasons are in triolet/config/scheduling.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from triolet.config import (
    DAY_S,
    AdmissionConfig,
    BrownoutConfig,
    GuardConfig,
    OverloadConfig,
    SloConfig,
)

from .arguments import server_arguments

if TYPE_CHECKING:
    from triolet.config import ServerConfig

_DEFAULT: Final = OverloadConfig()
_SLO: Final = _DEFAULT.slo
_option = partial(typer.Option, rich_help_panel="Overload")
_seconds = partial(_option, min=0.001, max=DAY_S)


def overload_options(
    ttft_slo: Annotated[
        float, _seconds(help="Seconds to the first token; who would wait longer is refused.")
    ] = _SLO.default_s,
    critical_ttft_slo: Annotated[
        float, _seconds(help="The same for critical requests.")
    ] = _SLO.critical_s,
    sheddable_ttft_slo: Annotated[
        float, _seconds(help="The same for sheddable requests.")
    ] = _SLO.sheddable_s,
    no_admission: Annotated[
        bool, _option("--no-admission", help="Let wait whatever fits into the queue.")
    ] = not _DEFAULT.admission.is_on,
    no_brownout: Annotated[
        bool, _option("--no-brownout", help="Shorten no answers, pause no batches.")
    ] = not _DEFAULT.brownout.is_on,
    no_guard: Annotated[
        bool, _option("--no-guard", help="Let only predictions bound what is taken on.")
    ] = not _DEFAULT.guard.is_on,
) -> OverloadConfig:
    """Return what a server does about too much load."""
    return OverloadConfig(
        SloConfig(critical_ttft_slo, ttft_slo, sheddable_ttft_slo),
        AdmissionConfig(is_on=not no_admission),
        BrownoutConfig(is_on=not no_brownout),
        GuardConfig(is_on=not no_guard),
    )


def overload_arguments(config: OverloadConfig) -> list[str]:
    """Return the options that mean this."""
    switches = {
        "admission": config.admission.is_on,
        "brownout": config.brownout.is_on,
        "guard": config.guard.is_on,
    }
    return [
        *("--ttft-slo", str(config.slo.default_s)),
        *("--critical-ttft-slo", str(config.slo.critical_s)),
        *("--sheddable-ttft-slo", str(config.slo.sheddable_s)),
        *(f"--no-{name}" for name, is_on in switches.items() if not is_on),
    ]


def front_arguments(config: ServerConfig) -> list[str]:
    """Return the options of a server, these included."""
    return [*server_arguments(config), *overload_arguments(config.overload)]
