"""`python -m tools.demo_model.export`: write a checkpoint as a Hugging Face Llama directory."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from .model import Llama, ModelConfig
from .tokenizer import BOS, BOS_ID, CHAT_TEMPLATE, END, END_ID, PAD, PAD_ID, SPECIALS
from .train import BUILD, Progress, load, tokenizer_in


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the model's config.json for transformers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def tokenizer_config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the tokenizer_config.json with the chat template."""
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(i): {"content": content, **token, "special": True}
            for i, content in enumerate(SPECIALS)
        },
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [t for t in SPECIALS if t not in (BOS, END, PAD)],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


GENERATION = {
    "bos_token_id": BOS_ID,
    "eos_token_id": [END_ID],
    "pad_token_id": PAD_ID,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "max_new_tokens": 400,
}


def export(build: Path, directory: Path) -> Progress:
    """Write the newest checkpoint as a model directory with bfloat16 weights."""
    model = Llama(ModelConfig())
    progress = load(build / "checkpoint.safetensors", model, [])
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    tokenizer_in(build).save(str(directory / "tokenizer.json"))
    for name, content in (
        ("config.json", config_json(model.config)),
        ("tokenizer_config.json", tokenizer_config_json(model.config)),
        ("generation_config.json", GENERATION),
        (
            "training.json",
            {
                "parameters": model.num_parameters,
                "steps": progress.step,
                "tokens": progress.tokens,
                "minutes": round(progress.seconds / 60, 1),
            },
        ),
    ):
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return progress


def main(
    build: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = BUILD,
    directory: Annotated[Path, typer.Option(help="Directory to write.")] = Path("triolet/demo"),
) -> None:
    """Export the newest checkpoint."""
    export(build, directory)


if __name__ == "__main__":
    typer.run(main)
