"""transformers' continuous batching on a GPU: `python -m loadtest.bench.peer_batching MODEL`.

Prints one JSON line: tokens per second by batch. The time of a run with many tokens less that of
one with few is what the tokens between took, so prompts do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from .peer_loop import prompts_of

FEW: Final = 8
MANY: Final = 72


def seconds(model: Any, prompts: list[list[int]], tokens: int) -> float:  # noqa: ANN401
    """Return what so many tokens for each prompt take."""
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1}
    config = GenerationConfig.from_dict(settings)
    torch.cuda.synchronize()
    began_at = perf_counter()
    results = model.generate_batch(inputs=prompts, generation_config=config)
    torch.cuda.synchronize()
    elapsed_s = perf_counter() - began_at
    got = [len(result.generated_tokens) for result in results.values()]
    assert got == [tokens] * len(prompts), "a request ended early"
    return elapsed_s


def main() -> None:
    """Measure each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--context", type=int, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda"
    )
    speeds = {}
    with torch.inference_mode():
        for batch in arguments.batches:
            prompts = prompts_of(batch, arguments.context)
            seconds(model, prompts, FEW)
            few_s = seconds(model, prompts, FEW)
            many_s = seconds(model, prompts, MANY)
            speeds[batch] = batch * (MANY - FEW) / (many_s - few_s)
    sys.stdout.write(json.dumps(speeds) + "\n")


if __name__ == "__main__":
    main()
