"""The options of admission and overload, the configuration that they become, and back.

Defaults and reasons are in triolet/config_overload.py.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import typer

from triolet.config import DAY_S
from triolet.config_overload import (
    AdmissionConfig,
    BrownoutConfig,
    GuardConfig,
    OverloadConfig,
    SloConfig,
)

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
    admission: Annotated[
        bool, _option(help="Refuse at once what would come too late.")
    ] = _DEFAULT.admission.is_on,
    brownout: Annotated[
        bool, _option(help="Give up step by step what matters least.")
    ] = _DEFAULT.brownout.is_on,
    guard: Annotated[
        bool, _option(help="Bound what waits for first tokens once they come late.")
    ] = _DEFAULT.guard.is_on,
) -> OverloadConfig:
    """Return what a server does about too much load."""
    return OverloadConfig(
        SloConfig(critical_ttft_slo, ttft_slo, sheddable_ttft_slo),
        AdmissionConfig(is_on=admission),
        BrownoutConfig(is_on=brownout),
        GuardConfig(is_on=guard),
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
        *(f"--{name}" if is_on else f"--no-{name}" for name, is_on in switches.items()),
    ]
