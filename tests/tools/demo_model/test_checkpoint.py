"""Tests of training checkpoints of the demo model: training continues exactly from the saved
weights, optimizers and progress."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tools.demo_model.model import Llama, ModelConfig
from tools.demo_model.train import Progress, load, loss_of, make_optimizers, save, start_from

DEMO = Path(__file__).parents[3] / "triolet" / "demo"
TINY = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1)


def train(model: Llama, optimizers: list[torch.optim.Optimizer], seed: int) -> float:
    """Take one step on a batch that the seed determines; return its loss."""
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(seed))
    learned = torch.ones(2, 8, dtype=torch.bool)
    loss = loss_of(model, model.hidden, (ids[:, :-1], ids[:, 1:], learned))
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def test_training_goes_on_exactly_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(TINY)
    optimizers = make_optimizers(model)
    for seed in range(3):
        train(model, optimizers, seed)
    path = tmp_path / "checkpoint.safetensors"
    save(path, model, optimizers, Progress(step=3, tokens=48, seconds=1.5))
    uninterrupted = [train(model, optimizers, seed) for seed in range(3, 6)]

    resumed = Llama(TINY)
    its_optimizers = make_optimizers(resumed)
    progress = load(path, resumed, its_optimizers)
    assert progress == Progress(step=3, tokens=48, seconds=1.5)
    assert [train(resumed, its_optimizers, seed) for seed in range(3, 6)] == uninterrupted


def test_without_a_checkpoint_training_begins_anew(tmp_path: Path) -> None:
    assert load(tmp_path / "none.safetensors", Llama(TINY), []) == Progress()


def test_training_goes_on_from_a_model_directory_with_its_tokenizer(tmp_path: Path) -> None:
    start_from(DEMO, tmp_path)
    model = Llama(ModelConfig())
    progress = load(tmp_path / "checkpoint.safetensors", model, make_optimizers(model))
    said = json.loads((DEMO / "training.json").read_text())
    assert (progress.step, progress.tokens) == (said["steps"], said["tokens"])
    shipped = load_file(DEMO / "model.safetensors")
    assert all(torch.equal(w, shipped[name].float()) for name, w in model.state_dict().items())
    assert (tmp_path / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()


def test_a_checkpoint_is_not_replaced_by_a_model_directory(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint.safetensors", Llama(TINY), [], Progress(step=3))
    start_from(DEMO, tmp_path)
    assert load(tmp_path / "checkpoint.safetensors", Llama(TINY), []).step == 3
