"""`python -m tools.demo_model.train --tokens 20000000`: train the demo model.

Uses Muon for matrices and AdamW for embeddings and norms. The learning rate warms up, stays
constant, and falls to zero over the last part, so a run can be extended before that part.
Checkpoints are in `build/demo_model/`. A run continues from an existing checkpoint, and SIGTERM
writes one.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import hard_sums
from .corpus import DEFAULT_SHARES, SKILLS, SUMS_SHARES
from .model import Llama, ModelConfig
from .packing import batches
from .tokenizer import train_tokenizer

BUILD = Path("build/demo_model")
MUON_RATE, ADAM_RATE = 1.6e-3, 1.2e-3
"""Learning rates of the constant part. Muon's is scaled to AdamW's update size
(`match_rms_adamw`)."""
WARMUP_TOKENS = 200_000


@dataclass(slots=True)
class Progress:
    """State of a checkpoint in addition to the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def rate_factor(tokens: int, done: float, cooldown: float) -> float:
    """Return the learning rate as a share of the constant one.

    Args:
      tokens: tokens so far, for the warm-up.
      done: completed share of the run, by tokens or time.
      cooldown: last share of the run, in which the rate falls to zero.
    """
    if tokens < WARMUP_TOKENS:
        return (tokens + 4096) / (WARMUP_TOKENS + 4096)
    return min(1.0, max(0.0, (1.0 - done) / cooldown))


def make_optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the other parameters."""
    matrices = [w for n, w in model.named_parameters() if w.dim() == 2 and "embed" not in n]
    rest = [w for n, w in model.named_parameters() if w.dim() != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices, lr=MUON_RATE, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def loss_of(
    model: Llama, hidden: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the mean loss over tokens of replies. `hidden` is `model.hidden`, maybe compiled."""
    ids, targets, learned = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(hidden(ids)[learned])
    return F.cross_entropy(logits.float(), targets[learned])


def save(
    path: Path, model: Llama, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write a checkpoint atomically."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            for name, value in moments.items():
                tensors[f"optimizer.{number}.{index}.{name}"] = torch.as_tensor(value)
    said = {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path.with_suffix(".tmp"),
        metadata={name: str(value) for name, value in said.items()},
    )
    path.with_suffix(".tmp").replace(path)


def load(path: Path, model: Llama, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Read a checkpoint if it exists."""
    if not path.exists():
        return Progress()
    with safe_open(path, framework="pt") as checkpoint:
        tensors = {name: checkpoint.get_tensor(name) for name in checkpoint.keys()}  # noqa: SIM118
        said = checkpoint.metadata()
    prefix = "model."
    model.load_state_dict(
        {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    )
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, *rest = name.split(".")
            if kind == "optimizer" and int(rest[0]) == number:
                state.setdefault(int(rest[1]), {})[rest[2]] = tensor
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return Progress(int(said["step"]), int(said["tokens"]), float(said["seconds"]))


def start_from(directory: Path, build: Path) -> None:
    """Create a checkpoint from a model directory, with new optimizers, if the build has none."""
    path = build / "checkpoint.safetensors"
    if path.exists():
        return
    build.mkdir(parents=True, exist_ok=True)
    shutil.copy(directory / "tokenizer.json", build)
    model = Llama(ModelConfig())
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    said = json.loads((directory / "training.json").read_text())
    save(path, model, [], Progress(said["steps"], said["tokens"], said["minutes"] * 60.0))


def tokenizer_in(build: Path) -> Tokenizer:
    """Load the build's tokenizer, or train it if it is missing."""
    path = build / "tokenizer.json"
    if not path.exists():
        build.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save(str(path))
    return Tokenizer.from_file(str(path))


def run(
    build: Path,
    total: int,
    limit_s: float,
    cooldown: float,
    length: int,
    rows: int,
    save_every_s: float,
    shares: dict[str, float] | None,
    compiled: bool,
) -> None:
    """Train until the given number of tokens or the time limit is reached."""
    tokenizer = tokenizer_in(build)
    model = Llama(ModelConfig())
    optimizers = make_optimizers(model)
    hidden: Callable[[Tensor], Tensor] = torch.compile(model.hidden) if compiled else model.hidden
    rates = [MUON_RATE, ADAM_RATE]
    checkpoint = build / "checkpoint.safetensors"
    progress = load(checkpoint, model, optimizers)
    source = batches(tokenizer, 1_000_003 * (progress.step + 1), length, rows, shares)
    started = saved = time.monotonic()
    before, mean = progress.seconds, 0.0
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked_to_stop.append(number))
    done = 0.0
    while done < 1.0 and not asked_to_stop:
        done = max(progress.tokens / total, (time.monotonic() - started) / limit_s)
        factor = rate_factor(progress.tokens, done, cooldown)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss = loss_of(model, hidden, next(source))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += rows * length
        progress.seconds = before + time.monotonic() - started
        mean = loss.item() if mean == 0.0 else 0.95 * mean + 0.05 * loss.item()
        if progress.step % 20 == 0:
            speed = progress.tokens / progress.seconds
            sys.stdout.write(
                f"step {progress.step} tokens {progress.tokens} loss {mean:.4f} "
                f"rate {factor:.3f} {speed:.0f} tokens/s\n"
            )
            sys.stdout.flush()
        if time.monotonic() - saved > save_every_s:
            save(checkpoint, model, optimizers, progress)
            saved = time.monotonic()
    save(checkpoint, model, optimizers, progress)


def main(
    tokens: Annotated[int, typer.Option(help="Total tokens.")] = 20_000_000,
    minutes: Annotated[float, typer.Option(help="Time limit in minutes.")] = 24 * 60.0,
    cooldown: Annotated[float, typer.Option(help="Last share, with a falling rate.")] = 0.3,
    build: Annotated[Path, typer.Option(help="Directory of checkpoints.")] = BUILD,
    start: Annotated[str, typer.Option(help="Model directory to start from.")] = "",
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 512,
    rows: Annotated[int, typer.Option(help="Rows per batch.")] = 8,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    save_every_s: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 120.0,
    shares: Annotated[str, typer.Option(help="Shares of skills: `sums` or JSON.")] = "",
    practise: Annotated[str, typer.Option(help="File of sums, from `evaluate --mistakes`.")] = "",
    compiled: Annotated[
        bool, typer.Option(help="Compile: 1.8 x as fast; needs a compiler.")
    ] = True,
) -> None:
    """Train the demo model, or continue training it."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if start:
        start_from(Path(start), build)
    chosen = SUMS_SHARES if shares == "sums" else json.loads(shares) if shares else None
    if practise:
        SKILLS[hard_sums.PRACTICE] = hard_sums.practice(Path(practise))
        chosen = (chosen or DEFAULT_SHARES) | {hard_sums.PRACTICE: hard_sums.PRACTICE_SHARE}
    limit_s = minutes * 60.0
    run(build, tokens, limit_s, cooldown, length, rows, save_every_s, chosen, compiled)


if __name__ == "__main__":
    typer.run(main)
