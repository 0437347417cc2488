"""The command line: `triolet serve`, single roles, and what operates and describes them.

Only parses and hands over. What a command needs is imported when it runs, so that `triolet --help`
and `triolet server` never load torch. Every error ends here: one line on stderr that names cause
and remedy, and an exit code; no traceback for anything that the user can mend.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path  # noqa: TC003 (typer reads annotations)
from typing import TYPE_CHECKING, Annotated, Final

import typer

from triolet.config import (
    EngineConfig,
    GpuConfig,
    LinkConfig,
    LocalPrefill,
    OverloadConfig,
    ServerConfig,
    SpeculationConfig,
)
from triolet.errors import ConfigError
from triolet.private_files import keep_private

from ..exit_codes import EXIT_BAD_INPUT, EXIT_FAILED, CommandFailed
from ..plain_text import as_typed, one_line
from ..supervisor.placement import Pinning
from .option_groups import with_groups
from .options import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    WORKER_DRAIN_S,
    CurveOption,
    DrainDeadlineOption,
    FleetPortOption,
    KvPlaintextOption,
    LendingOption,
    LogLevelOption,
    ModelArgument,
    PinOption,
    RolesOption,
    ServersOption,
    SiblingsOption,
    SupervisorPidOption,
    WorkerDrainOption,
    WorkerNameOption,
    engine_options,
    gpu_options,
    link_options,
    read_lending,
    read_siblings,
    server_options,
    speculation_options,
)
from .overload_options import overload_options
from .tenant_commands import tenant_app
from .tenant_options import require_tenants
from .worker_options import worker_config

if TYPE_CHECKING:
    from collections.abc import Sequence


EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""
COMPLETION_VARIABLE: Final = "_TRIOLET_COMPLETE"
"""Set by the scripts of `triolet completion`: a shell asks what could come next."""


class Shell(StrEnum):
    """Shells that there is a completion script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


app = typer.Typer(
    name="triolet",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
keys_app = typer.Typer(help="Keys for tcp links between processes.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(tenant_app, name="tenant")


def _version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models: prefill and decode in separate processes."""
    del version  # its callback has done everything


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if COMPLETION_VARIABLE in os.environ:
        from typer.completion import get_completion_inspect_parameters

        get_completion_inspect_parameters()  # registers what answers the shells
    try:
        result = app(args=arguments, prog_name="triolet", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; what Python still holds for it must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except typer.TyperException as error:
        return _complain_of_usage(error)
    except ConfigError as error:
        return _complain(str(error), EXIT_BAD_INPUT)
    except CommandFailed as error:
        return _complain(str(error), error.exit_code)
    return result if isinstance(result, int) else 0


def _complain_of_usage(error: typer.TyperException) -> int:
    # Called without arguments, a command has printed its help, and has nothing to add.
    message = error.format_message()
    if not message:
        return EXIT_BAD_INPUT
    context = getattr(error, "ctx", None)
    command = "triolet" if context is None else context.command_path
    return _complain(f"{message.rstrip('.')}; see `{command} --help`", EXIT_BAD_INPUT)


def _complain(message: str, exit_code: int) -> int:
    sys.stderr.write(f"triolet: {as_typed(one_line(message))}\n")
    return exit_code


@app.command()
@with_groups(
    server=server_options,
    overload=overload_options,
    engine=engine_options,
    gpu=gpu_options,
    speculation=speculation_options,
    link=link_options,
)
def serve(
    server: ServerConfig,
    overload: OverloadConfig,
    engine: EngineConfig,
    gpu: GpuConfig,
    speculation: SpeculationConfig,
    link: LinkConfig,
    model: ModelArgument = None,
    servers: ServersOption = 1,
    prefill: Annotated[
        int, typer.Option(help="Prefill workers, or 0.", rich_help_panel="Processes and links")
    ] = 1,
    decode: Annotated[
        int, typer.Option(help="Decode workers.", rich_help_panel="Processes and links")
    ] = 1,
    worker_drain_timeout: WorkerDrainOption = WORKER_DRAIN_S,
    pin: PinOption = Pinning.OFF,
    log_level: LogLevelOption = None,
) -> None:
    """Serve a model on this machine: a server, prefill and decode workers, kept alive."""
    from ..logs import configure_logs, default_level
    from ..model_directory import check_start, with_model_name
    from ..models.choose import ready_model

    level = log_level or default_level()
    keep_private()
    configure_logs(level, "supervisor")
    checked = check_start(ready_model(model), engine, speculation)
    require_tenants(server.tenants)

    from ..supervisor.plan import FleetPlan
    from ..supervisor.serve import serve as serve_fleet

    serve_fleet(
        FleetPlan(
            model_dir=checked.path,
            server=replace(with_model_name(server, checked.path), overload=overload),
            engine=replace(engine, gpu=gpu),
            link=link,
            servers=servers,
            prefill=prefill,
            decode=decode,
            log_level=level,
            worker_drain_timeout_s=worker_drain_timeout,
            speculation=speculation,
            pin=pin,
        )
    )


@app.command()
@with_groups(config=server_options, overload=overload_options, link=link_options)
def server(
    config: ServerConfig,
    overload: OverloadConfig,
    link: LinkConfig,
    model: ModelArgument = None,
    prefill: Annotated[
        list[str] | None, typer.Option(help="Control address of a prefill worker; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="Control address of a decode worker; repeatable.")
    ] = None,
    spare_prefill: Annotated[
        list[str] | None, typer.Option(help="One where a stand-in may appear; repeatable.")
    ] = None,
    spare_decode: Annotated[
        list[str] | None, typer.Option(help="One where a stand-in may appear; repeatable.")
    ] = None,
    curve: CurveOption = None,
    log_level: LogLevelOption = None,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    siblings: SiblingsOption = None,
    supervisor_pid: SupervisorPidOption = None,
) -> None:
    """Run one server for workers that run elsewhere."""
    from ..model_directory import find_model, with_model_name
    from ..role_process import run_role

    own = read_siblings(siblings)

    def run() -> None:
        named = {"prefill": prefill, "decode": decode}
        if config.routing.local_prefill is not LocalPrefill.OFF:
            del named["prefill"]
        for role, addresses in named.items():
            if not addresses:
                raise ConfigError(f"no {role} worker is named; give --{role} ADDRESS at least once")
        model_dir = find_model(model).path
        from server.main import main as run_server

        run_server(
            replace(
                with_model_name(config, model_dir),
                model_dir=str(model_dir),
                prefill_addresses=(*(prefill or ()), *(spare_prefill or ())),
                decode_addresses=(*(decode or ()), *(spare_decode or ())),
                spare_addresses=(*(spare_prefill or ()), *(spare_decode or ())),
                listen_fd=listen_fd,
                siblings=own,
                overload=overload,
                link=link,
                curve_dir=None if curve is None else str(curve),
            )
        )

    run_role("server", "server" if own is None else own.name, log_level, supervisor_pid, run)


@app.command()
@with_groups(engine=engine_options, gpu=gpu_options, link=link_options)
def prefill(
    engine: EngineConfig,
    gpu: GpuConfig,
    link: LinkConfig,
    control: Annotated[str, typer.Option(help="Address for servers: ipc://… or tcp://host:port.")],
    model: ModelArgument = None,
    name: WorkerNameOption = None,
    drain_timeout: WorkerDrainOption = WORKER_DRAIN_S,
    curve: CurveOption = None,
    kv_plaintext: KvPlaintextOption = False,
    log_level: LogLevelOption = None,
    lending: LendingOption = None,
    supervisor_pid: SupervisorPidOption = None,
) -> None:
    """Run one prefill worker."""
    name = name or f"prefill-{os.getpid()}"
    shared = read_lending(lending)

    from ..role_process import leave, run_role

    def run() -> None:
        compute = replace(engine, gpu=gpu)
        wire = replace(link.wire, plaintext=kv_plaintext)
        own = replace(link, wire=wire)
        config = worker_config(name, model, control, None, compute, own, curve, drain_timeout)
        from prefill.worker import main as run_worker

        run_worker(replace(config, lending=shared))
        leave()

    run_role("prefill", name, log_level, supervisor_pid, run)


@app.command()
@with_groups(
    engine=engine_options, gpu=gpu_options, speculation=speculation_options, link=link_options
)
def decode(
    engine: EngineConfig,
    gpu: GpuConfig,
    speculation: SpeculationConfig,
    link: LinkConfig,
    control: Annotated[str, typer.Option(help="Address for servers: ipc://… or tcp://host:port.")],
    kv: Annotated[str, typer.Option(help="Address for prefill workers, which send KV there.")],
    advertise_kv: Annotated[
        str | None,
        typer.Option(help="What they are told instead, where they see --kv under another address."),
    ] = None,
    model: ModelArgument = None,
    name: WorkerNameOption = None,
    drain_timeout: WorkerDrainOption = WORKER_DRAIN_S,
    curve: CurveOption = None,
    kv_plaintext: KvPlaintextOption = False,
    log_level: LogLevelOption = None,
    lending: LendingOption = None,
    supervisor_pid: SupervisorPidOption = None,
) -> None:
    """Run one decode worker."""
    name = name or f"decode-{os.getpid()}"
    shared = read_lending(lending)

    from ..role_process import leave, run_role

    def run() -> None:
        compute = replace(engine, gpu=gpu)
        wire = replace(link.wire, plaintext=kv_plaintext)
        config = worker_config(
            name, model, control, kv, compute, replace(link, wire=wire), curve, drain_timeout
        )
        from decode.worker import main as run_worker
        from transport.address import require_dialable

        if advertise_kv is not None:
            require_dialable(advertise_kv)
        own = replace(config, speculation=speculation, advertised_kv_address=advertise_kv)
        run_worker(replace(own, lending=shared))
        leave()

    run_role("decode", name, log_level, supervisor_pid, run)


@app.command()
def drain(
    target: Annotated[
        str, typer.Argument(help="Name of a worker of `triolet serve`, or a control address.")
    ],
    deadline: DrainDeadlineOption = WORKER_DRAIN_S,
    port: FleetPortOption = None,
    curve: CurveOption = None,
) -> None:
    """Let a worker finish or move what it runs, and leave; wait until it has."""
    from .fleet_commands import run_drain

    run_drain(target, deadline, curve, port)


@app.command()
def restart(role: RolesOption = None, port: FleetPortOption = None) -> None:
    """Restart the processes of `triolet serve` one after another, while it serves."""
    from .fleet_commands import run_restart

    run_restart(role or (), port)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model name.", show_default="the server's")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
) -> None:
    """Talk to a running server; piped, it answers each line of stdin. Where the server asks for an
    API key, set the environment variable TRIOLET_API_KEY to it."""
    from .chat import ChatOptions, run_chat

    run_chat(ChatOptions(url, model, max_tokens, temperature))


@app.command()
@with_groups(engine=engine_options)
def doctor(
    engine: EngineConfig,
    model: ModelArgument = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to serve on.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = DEFAULT_HOST,
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Look into the fleet of this running server instead: blocks, leases, requests.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine, the model and the port as `serve` does, and say what to do."""
    if ledger is not None:
        from .ledger import run_ledger

        raise typer.Exit(run_ledger(ledger, as_json=as_json))
    from .doctor import Wanted, run_doctor

    if not run_doctor(Wanted(model, host, port, engine), as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell that is to run the script.")],
) -> None:
    """Print a script with which a shell completes commands, options and choices."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(
        get_completion_script(
            prog_name="triolet", complete_var=COMPLETION_VARIABLE, shell=shell.value
        )
    )


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(f"triolet {installed('triolet')}")


@keys_app.command("make")
def make_keys(directory: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """Write a new key pair, and folders for the keys of other processes."""
    from transport.zmq_curve import make_keys as make

    public = make(directory)
    typer.echo(f"{directory}: new keys; others let this process in by its public key:")
    typer.echo(public.decode())
