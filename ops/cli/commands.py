"""The `triolet` command line: parses options and calls the code behind each command.

Commands import what they need when they run, so that `triolet --help` and `triolet server` never
load torch. `main` turns every error that a user can fix into one line on stderr, with cause and
remedy, and an exit code.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import structlog
import typer

from triolet.config import DAY_S, LocalPrefill, WorkerConfig
from triolet.errors import AuditLogError, ConfigError, RegistryFailed
from triolet.ids import Role
from triolet.plain_text import one_line
from triolet.private_files import keep_private

from ..exit_codes import EXIT_BAD_INPUT, EXIT_FAILED, CommandFailed
from ..settings.form import STDIN, Settings
from ..settings.sources import SettingSources  # noqa: TC001
from .audit_commands import audit_app
from .model_commands import model_app
from .model_orders import adapter_app, add_orders
from .narrowing import narrowed
from .options import (
    COMPUTE,
    NAMED,
    AuditOption,
    FleetPortOption,
    ModelArgument,
    ModelsArgument,
    add_models,
    as_typed,
    gather,
    with_settings,
)
from .probe_command import probe_app
from .registry_commands import registry_app
from .rollout_commands import rollout_app
from .signature_commands import signature_app
from .target_commands import OnOption, Where, ZoneOption, fleet_app, run_scale
from .tenant_commands import tenant_app

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.config import ServerConfig

    from ..supervisor.starter import Template

DRAIN_S: Final = WorkerConfig().drain_timeout_s
RestartedArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="Restart only the workers of these models.",
        show_default="every process",
    ),
]
RolesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Restart only this role: server, control, prefill or decode; repeatable.",
        show_default="all",
    ),
]
DrainDeadlineOption: TypeAlias = Annotated[
    float,
    typer.Option(
        min=0.0, max=DAY_S, help="Seconds until unfinished requests move to other workers."
    ),
]
CurveOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="Key directory (see `triolet keys make`).")
]


EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
COMPLETION_VARIABLE: Final = "_TRIOLET_COMPLETE"
"""Set by the scripts of `triolet completion` when a shell asks for suggestions."""


class Shell(StrEnum):
    """Shells with a completion script."""

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
slo_app = typer.Typer(help="Service level objectives.", no_args_is_help=True)
keys_app = typer.Typer(help="Keys for TCP links between processes.", no_args_is_help=True)
config_app = typer.Typer(help="Settings of every process.", no_args_is_help=True)
app.add_typer(adapter_app(), name="adapter")
app.add_typer(audit_app, name="audit")
app.add_typer(config_app, name="config")
app.add_typer(fleet_app, name="fleet")
app.add_typer(rollout_app, name="rollout")
app.add_typer(keys_app, name="keys")
add_orders(model_app)
model_app.add_typer(probe_app)
model_app.add_typer(registry_app)
model_app.add_typer(signature_app)
app.add_typer(model_app, name="model")
app.add_typer(slo_app, name="slo")
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
    del version  # handled by its callback


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if COMPLETION_VARIABLE in os.environ:
        from typer.completion import get_completion_inspect_parameters

        get_completion_inspect_parameters()  # registers the completion classes
    arguments = sys.argv[1:] if arguments is None else arguments
    # Logs go to stderr: stdout carries a command's output, such as a key or JSON.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        result = _run(arguments)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has exited. Without this, Python's flush at exit fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except typer.TyperException as error:
        return _complain_of_usage(error)
    except ConfigError as error:
        return _complain(str(error), EXIT_BAD_INPUT)
    except (AuditLogError, RegistryFailed) as error:
        return _complain(str(error), EXIT_FAILED)
    except CommandFailed as error:
        return _complain(str(error), error.exit_code)
    return result if isinstance(result, int) else 0


def _run(arguments: Sequence[str]) -> object:
    role, *options = arguments or ("",)
    if options != ["--config", STDIN] or role not in set(Role) - {Role.OPERATOR}:
        chosen = narrowed(app, arguments)
        return chosen(args=arguments, prog_name="triolet", standalone_mode=False)
    # The supervisor starts processes in this form. Skip Typer: its parser takes 0.1 s of a core.
    sources = gather(STDIN, (), {})
    try:
        match Role(role):
            case Role.SERVER:
                _run_server(sources, None)
            case Role.CONTROL:
                _run_control(sources)
            case worker:
                _run_worker(worker, sources, None)
    except typer.Exit as ending:
        return ending.exit_code
    return 0


def _complain_of_usage(error: typer.TyperException) -> int:
    # A command that was called without arguments has already printed its help.
    message = error.format_message().rstrip(".")
    if not message:
        return EXIT_BAD_INPUT
    context = getattr(error, "ctx", None)
    command = "triolet" if context is None else context.command_path
    options = () if context is None else context.command.params
    # Typer does not export the class of this error (an unknown option).
    if hasattr(error, "possibilities") and any("--set" in one.opts for one in options):
        message += "; use `--set FIELD=VALUE` for a setting without an option"
    return _complain(f"{message}; see `{command} --help`", EXIT_BAD_INPUT)


def _complain(message: str, exit_code: int) -> int:
    sys.stderr.write(f"triolet: {as_typed(one_line(message))}\n")
    return exit_code


@app.command()
@with_settings(*NAMED)
def serve(sources: SettingSources, models: ModelsArgument = None) -> None:
    """Serve one or more models on this machine, with a server, prefill and decode workers."""
    from ..logs import configure_logs, default_level
    from ..supervisor.starter import available_gpus, fork_templates, roles_of_templates

    add_models(sources, models or ())
    sources.refuse_for_serve()
    settings = sources.settings()
    level = settings.process.log_level or default_level()
    keep_private()
    configure_logs(level, "supervisor")
    settings = replace(settings, process=replace(settings.process, log_level=level))
    gpus = available_gpus()
    templates = fork_templates(roles_of_templates(settings, gpus), main)
    _serve(settings, gpus, templates)


def _serve(settings: Settings, gpus: tuple[str, ...], templates: Mapping[Role, Template]) -> None:
    """Serve from templates, which import while this process does and looks at the model."""
    from ..models.several import with_stored_models
    from ..supervisor.prepare import prepare
    from ..supervisor.serve import command_line
    from ..supervisor.serve import serve as serve_fleet
    from ..supervisor.starter import Starter

    silence_s = settings.supervisor.start_silence_s
    with (
        closing(Starter(templates, command_line(), silence_s)) as starter,
        with_stored_models(settings) as stored,
    ):
        serve_fleet(prepare(settings, stored, gpus), starter, stored)


@app.command(hidden=True)
def template(modules: list[str]) -> None:
    """Fork role processes that have their modules imported (started by the supervisor)."""
    from socket import socket

    from ..template import run_template

    with socket(fileno=os.dup(0)) as requests:
        run_template(requests, modules, main)


@app.command()
@with_settings()
def server(sources: SettingSources, model: ModelArgument = None) -> None:
    """Run one server for workers that are started separately."""
    _run_server(sources, model)


def _run_server(sources: SettingSources, model: str | None) -> None:
    from ..models.adapters import with_adapters
    from ..models.model_directory import check_text, find_model, with_model_name
    from ..models.stored import with_stored_model
    from ..role_process import run_role

    sources.refuse_for_role(Role.SERVER)
    settings = with_model(sources.settings(), model)
    own = settings.server

    def run() -> None:
        for each in own.of_models:
            _require_addresses(each, f"model {each.model_name}: " if own.models else "")
            if own.models:
                check_text(find_model(each.model_dir))
        with with_stored_model(settings) as found, with_adapters(found) as stored:
            ready = stored.server
            if not own.models:
                model_dir = find_model(stored.fleet.model)
                check_text(model_dir)
                ready = replace(with_model_name(ready, model_dir), model_dir=str(model_dir))
            from server.main import main as run_server

            run_server(ready)

    name = "server" if own.peers is None else own.peers.name
    run_role("server", name, settings.process, run)


def _require_addresses(config: ServerConfig, about: str) -> None:
    is_prefill_needed = config.routing.local_prefill is LocalPrefill.OFF
    for role, addresses in (
        ("prefill", config.prefill_addresses or not is_prefill_needed),
        ("decode", config.decode_addresses),
    ):
        if not addresses and not config.sources:
            raise ConfigError(
                f"{about}no {role} worker is named; give --set server.{role}_addresses=ADDRESS, or "
                "a server.members_file, server.membership.dns or server.membership.redis"
            )


@app.command()
@with_settings()
def prefill(sources: SettingSources, model: ModelArgument = None) -> None:
    """Run one prefill worker."""
    _run_worker(Role.PREFILL, sources, model)


@app.command()
@with_settings()
def decode(sources: SettingSources, model: ModelArgument = None) -> None:
    """Run one decode worker."""
    _run_worker(Role.DECODE, sources, model)


@app.command()
@with_settings()
def control(sources: SettingSources) -> None:
    """Run the process that moves model names between versions, for servers on several hosts."""
    _run_control(sources)


def _run_control(sources: SettingSources) -> None:
    from ..control.process import main as run_control
    from ..control.process import run_alone
    from ..role_process import run_role

    sources.refuse_for_role(Role.CONTROL)
    settings = sources.settings()
    own = settings.control
    if not own.address:
        raise ConfigError(
            "control.address is missing; give the address where servers reach this control, such "
            "as --set control.address=tcp://10.0.0.9:7100 with control.curve_dir. `triolet serve "
            "NAME=MODEL …` starts a control of its own"
        )
    run = partial(run_control if own.directory else run_alone, own)
    run_role(Role.CONTROL.value, Role.CONTROL.value, settings.process, run)


def _run_worker(role: Role, sources: SettingSources, model: str | None) -> None:
    from ..own_process import leave
    from ..role_process import run_role

    sources.refuse_for_role(role)
    settings = with_model(sources.settings(), model)
    own = settings.worker(role)
    config = replace(own, name=own.name or f"{role}-{os.getpid()}")
    if not config.control_address:
        raise ConfigError(
            f"{role}.control_address is missing; give --set {role}.control_address=ADDRESS, which "
            "is ipc://PATH or tcp://HOST:PORT"
        )
    if role is Role.DECODE and config.kv_address is None:
        raise ConfigError(
            "decode.kv_address is missing; give --set decode.kv_address=ADDRESS, where prefill "
            "workers send KV"
        )

    def run() -> None:
        from ..models.adapters import with_adapters
        from ..models.model_directory import check_start
        from ..models.stored import with_stored_model

        with with_stored_model(settings) as named, with_adapters(named) as stored:
            one = stored.worker(role)
            # Check before loading torch, which takes seconds.
            path, found = check_start(stored.fleet.model, one.engine)
            ready = replace(config, model_dir=str(path), engine=found.engine)
            ready = replace(ready, model_digest=one.model_digest, model_store=one.model_store)
            ready = replace(ready, compute_digest=one.compute_digest)
            if role is Role.PREFILL:
                from prefill.worker import main as run_prefill

                run_prefill(ready)
            else:
                from decode.worker import main as run_decode
                from transport.address import require_dialable

                if ready.advertised_kv_address is not None:
                    require_dialable(ready.advertised_kv_address)
                run_decode(ready)
            leave()

    run_role(role.value, config.name, settings.process, run)


def with_model(settings: Settings, model: str | None) -> Settings:
    """Return the settings with this model, or unchanged if it is None."""
    if model is None:
        return settings
    return replace(settings, fleet=replace(settings.fleet, model=model))


@app.command()
def drain(
    target: Annotated[
        str, typer.Argument(help="Name of a local worker, or the control address of any worker.")
    ],
    deadline: DrainDeadlineOption = DRAIN_S,
    port: FleetPortOption = None,
    curve: CurveOption = None,
    audit: AuditOption = None,
) -> None:
    """Let a worker finish or hand over its requests and exit. Wait until it has exited."""
    from .fleet_commands import run_drain

    run_drain(target, deadline, curve, port, audit)


@app.command()
def restart(
    models: RestartedArgument = None,
    role: RolesOption = None,
    port: FleetPortOption = None,
    audit: AuditOption = None,
) -> None:
    """Restart the processes of a running `triolet serve` one at a time, while it serves."""
    from .fleet_commands import run_restart

    run_restart(models or (), role or (), port, audit)


@app.command()
@with_settings()
def scale(
    sources: SettingSources,
    targets: Annotated[
        list[str],
        typer.Argument(help="[MODEL.]ROLE=NUMBER, such as decode=2", metavar="TARGET..."),
    ],
    on: OnOption = Where.LOCAL,
    zone: ZoneOption = "",
    port: FleetPortOption = None,
    audit: AuditOption = None,
) -> None:
    """Change the number of workers of a running fleet."""
    if on == Where.LOCAL and sources.words:
        raise ConfigError(f"{sources.words[0]} has no effect on a local fleet; leave it out")
    run_scale(targets, on, zone, sources.settings(), port, audit)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Address of a running server.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[
        str | None, typer.Option(help="Model name.", show_default="the server's")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum answer length.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
) -> None:
    """Chat with a running server, or answer each line of a pipe. TRIOLET_API_KEY is the API key."""
    from .chat import run_chat

    run_chat(url, model, max_tokens=max_tokens, temperature=temperature)


@app.command()
@with_settings("host", "port", "allow_remote_clients", *COMPUTE)
def doctor(
    sources: SettingSources,
    models: ModelsArgument = None,
    ledger: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Check the fleet of this running server instead: blocks, leases, requests.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, the model and the port as `serve` does, and report what to fix."""
    if ledger is not None:
        from .ledger import run_ledger

        raise typer.Exit(run_ledger(ledger, as_json=as_json))
    from .doctor import WantedFleet, run_doctor

    add_models(sources, models or ())
    wanted = WantedFleet(sources.settings(), [*(models or ()), *sources.words])
    if not run_doctor(wanted, as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command()
@with_settings("usage_dir")
def usage(
    sources: SettingSources,
    by: Annotated[
        str, typer.Option(help="Comma-separated: tenant, model, version, class, day, outcome.")
    ] = "tenant,model",
    since: Annotated[str, typer.Option(help="How far back, such as 24h or 7d.")] = "30d",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Sum up the usage ledger: requests, tokens and prices."""
    from .usage_commands import run_usage

    run_usage(sources.settings().server.usage.directory, by, since, as_csv=as_csv)


@slo_app.command("rules")
@with_settings("slo")
def slo_rules(sources: SettingSources) -> None:
    """Print Prometheus recording and alert rules for the objectives."""
    from ..slo_rules import write_rules

    write_rules(sources.settings().server.objectives)


@config_app.command("show")
@with_settings(*NAMED)
def show_config(
    sources: SettingSources,
    models: ModelsArgument = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only settings that differ from their defaults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every setting with its value, origin and reason. Takes the arguments of `serve`."""
    from .show_config import run_show_config

    add_models(sources, models or ())
    run_show_config(sources, only_changed=changed, as_json=as_json)


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="Shell that will run the script.")],
) -> None:
    """Print a script that makes a shell complete commands, options and choices."""
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
def make_keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR")], audit: AuditOption = None
) -> None:
    """Create a key pair, and directories for the keys of other processes."""
    from transport.zmq_curve import make_keys as make

    from ..audit.events import Action
    from ..audit.recording import recorded

    with recorded(Action.KEYS_MAKE, str(directory.resolve()), folder=audit):
        public = make(directory)
    typer.echo(f"{directory}: new keys. Other processes admit this one by its public key:")
    typer.echo(public.decode())
