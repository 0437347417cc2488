"""Generate greedy replies with a model directory, in batches, for the evaluation."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from .model import Cache, Llama, ModelConfig
from .tokenizer import END_ID, PAD_ID

Message = dict[str, str]


class Speaker:
    """A loaded model that replies to conversations."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        names = {field.name for field in fields(ModelConfig)}
        config["rope_theta"] = config.get("rope_theta", 10_000.0)
        self.model = Llama(ModelConfig(**{k: v for k, v in config.items() if k in names}))
        weights = load_file(directory / "model.safetensors")
        self.model.load_state_dict({k: v.float() for k, v in weights.items()})
        self.model.eval()
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        template = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
        self.template = ImmutableSandboxedEnvironment().from_string(template)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Render a conversation with the chat template and encode it."""
        text = self.template.render(messages=list(messages), add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def replies(
        self, talks: Sequence[Sequence[Message]], max_tokens: int = 200, batch_size: int = 32
    ) -> list[str]:
        """Reply to each conversation, in order. A truncated reply ends with `…`."""
        prompts = [self.prompt_ids(talk) for talk in talks]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out = [""] * len(prompts)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            written = greedy(self.model, [prompts[i] for i in chosen], max_tokens)
            for i, ids in zip(chosen, written, strict=True):
                ended = END_ID in ids
                ids = ids[: ids.index(END_ID)] if ended else ids
                out[i] = self.tokenizer.decode(ids) + ("" if ended else "…")
        return out


@torch.inference_mode()
def greedy(model: Llama, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Continue prompts greedily until all have ended.

    Args:
      model: model on the CPU.
      prompts: token ids; shorter prompts are padded on the left, with the padding masked.
      max_tokens: maximum number of tokens to generate.
    """
    width = max(len(prompt) for prompt in prompts)
    padding = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[PAD_ID] * (width - len(p)) + list(p) for p in prompts])
    room = min(max_tokens, model.config.max_position_embeddings - width)
    cache = Cache()
    columns = torch.arange(width + room)
    visible = columns[None, :] >= padding[:, None]  # [B, all]
    causal = columns[:width, None] >= columns[None, :width]
    mask = (visible[:, None, None, :width] & causal) | torch.eye(width, dtype=torch.bool)
    positions = (columns[None, :width] - padding[:, None]).clamp(min=0)
    step: Tensor = ids
    written: list[Tensor] = []
    for n in range(room):
        hidden = model.hidden(step, mask, positions, cache)[:, -1]
        step = model.logits(hidden).argmax(-1, keepdim=True)
        written.append(step)
        if all(END_ID in row for row in torch.cat(written, 1).tolist()):
            break
        mask = visible[:, None, None, : width + n + 1]
        positions = (width + n - padding)[:, None]
    return [list(row) for row in torch.cat(written, 1).tolist()]
