"""`triolet model probe`: loads a version as a worker does, and stores its golden tokens and its
measured speed with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from triolet.config import ServerConfig
from triolet.errors import ConfigError, ModelError
from triolet.ids import Role

from ..audit.events import Action
from ..settings.sources import SettingSources  # noqa: TC001
from .model_commands import RefArgument, capacity_line, golden_line, say
from .options import COMPUTE, AuditOption, with_settings

if TYPE_CHECKING:
    from store.layout import ModelStore
    from store.measured import Golden, MeasuredCapacity
    from triolet.config import WorkerConfig

    from ..settings.form import Settings

PROMPTS: Final = (
    "Once upon a time there was a little girl",
    "The capital of France is the city of Paris",
)
PROMPT_TOKENS: Final = 8
"""Tokens used of each prompt. Together they fill the first step of a worker without golden tokens,
so that checking them does not make a start slower."""

probe_app = typer.Typer()


@probe_app.command("probe")
@with_settings(*COMPUTE)
def probe(
    sources: SettingSources,
    ref: RefArgument,
    replace_: Annotated[
        bool, typer.Option("--replace", help="Replace different golden tokens.")
    ] = False,
    audit: AuditOption = None,
) -> None:
    """Compute the golden tokens of a version, measure its speed here, and store both."""
    from store.layout import ModelStore
    from store.measured import keep_measured

    from ..audit.recording import recorded
    from ..models.stored import with_stored_model

    settings = sources.settings()
    # The configuration may be shared with a fleet: drop its other models and its server settings.
    fleet = replace(settings.fleet, model=ref, adapters={})
    settings = replace(settings, models={}, fleet=fleet, server=ServerConfig())
    with with_stored_model(settings, is_served=False) as stored:
        digest = stored.decode.model_digest
        if not digest:
            raise ConfigError(
                f"{ref} is not a version in the store; `triolet model import` makes one from a "
                "directory, and `triolet model list` shows all versions"
            )
        store = ModelStore(Path(stored.decode.model_store))
        with recorded(Action.MODEL_PROBE, ref, folder=audit, after=digest):
            golden, capacity = _probed(_decode_worker(stored))
            if not replace_:
                _require_same(store, digest, golden)
            with store.writing() as writer:
                keep_measured(writer, digest, [golden, capacity])
    say(f"{ref} is {digest}")
    say(golden_line(golden))
    say(capacity_line(capacity))
    typer.echo(msgspec.json.encode({"golden": golden, "capacity": capacity}).decode())


def _decode_worker(stored: Settings) -> WorkerConfig:
    """Return the config of a decode worker with the engine settings that `triolet serve` uses."""
    from ..supervisor.plan import worker_threads
    from ..supervisor.prepare import prepare
    from ..supervisor.serve import available_cores
    from ..supervisor.starter import available_gpus

    plan = prepare(stored, [stored], available_gpus())
    (model,) = plan.models
    config = model.settings.decode
    threads = worker_threads(plan, Role.DECODE, available_cores())
    engine = replace(config.engine, threads=threads)
    return replace(config, engine=engine, model_dir=str(model.model_dir))


def _probed(config: WorkerConfig) -> tuple[Golden, MeasuredCapacity]:
    from tokenizers import Tokenizer

    from ..own_process import spin_briefly

    path = Path(config.model_dir) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {error}; import the model again") from error
    prompts = [tokenizer.encode(text).ids[:PROMPT_TOKENS] for text in PROMPTS]
    if not all(prompts):
        raise ModelError(f"{path} returns no tokens for {PROMPTS[0]!r}; import the model again")
    spin_briefly()  # before torch is loaded
    from worker.probe import main as run_probe

    return run_probe(config, prompts)


def _require_same(store: ModelStore, digest: str, golden: Golden) -> None:
    """Check that no different golden tokens are stored for the same key.

    Raises:
      ModelError: the stored tokens differ.
    """
    from store.measured import Golden, KeptMeasurement, measured_of
    from store.referrers import GOLDEN_TYPE

    for one in measured_of(store, digest, GOLDEN_TYPE):
        if not isinstance(one, KeptMeasurement) or not isinstance(one.said, Golden):
            continue
        if one.said.key == golden.key and one.said != golden:
            there, here = (
                [list(prompt.golden_ids) for prompt in said.prompts] for said in (one.said, golden)
            )
            raise ModelError(
                f"{digest} has golden tokens for {golden.key}, {there} in {one.path}, but this "
                f"machine computes {here}; the stored ones are kept: find out which machine "
                "computes wrongly, and give --replace if this one is right"
            )
