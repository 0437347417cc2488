"""The formats in which models write reasoning and tool calls."""

from __future__ import annotations

from enum import StrEnum


class ReasoningParser(StrEnum):
    """Format of a model's reasoning."""

    AUTO = "auto"  # by the tokenizer's markers
    NONE = "none"  # everything is text
    QWEN3 = "qwen3"  # <think>…</think>, opened by the prompt or by the completion's first token
    DEEPSEEK_R1 = "deepseek_r1"  # the same; a completion always begins inside it
    HARMONY = "harmony"  # channels of gpt-oss


class ToolParser(StrEnum):
    """Format of a model's tool calls."""

    AUTO = "auto"  # by the chat template or the tokens
    HERMES = "hermes"  # JSON between <tool_call> tags: Hermes, Qwen and many others
    LLAMA = "llama"  # bare JSON: Llama 3
    MISTRAL = "mistral"  # JSON after [TOOL_CALLS]
    QWEN3_CODER = "qwen3_coder"  # tags for each parameter
    PYTHONIC = "pythonic"  # [f(a=1)]: Llama 3.2 and 4
    HARMONY = "harmony"  # messages on channels: gpt-oss
    GRANITE = "granite"  # a JSON list after <|tool_call|>
    PHI = "phi"  # the same with a closing token: Phi-4-mini
