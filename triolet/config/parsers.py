"""How models write what is more than text: reasoning, and calls of tools."""

from __future__ import annotations

from enum import StrEnum


class ReasoningParser(StrEnum):
    """How a model writes its reasoning."""

    AUTO = "auto"  # as the tokenizer's markers say
    NONE = "none"  # all is text
    QWEN3 = "qwen3"  # <think>…</think>, opened by the prompt or by the completion's first token
    DEEPSEEK_R1 = "deepseek_r1"  # the same; a completion begins within it, whatever the prompt says
    HARMONY = "harmony"  # channels of gpt-oss


class ToolParser(StrEnum):
    """How a model writes calls of tools."""

    AUTO = "auto"  # as its chat template says, or its tokens
    HERMES = "hermes"  # JSON between <tool_call> tags: Hermes, Qwen and many others
    LLAMA = "llama"  # bare JSON: Llama 3
    MISTRAL = "mistral"  # JSON behind [TOOL_CALLS]
    QWEN3_CODER = "qwen3_coder"  # tags for each parameter
    PYTHONIC = "pythonic"  # [f(a=1)]: Llama 3.2 and 4
    HARMONY = "harmony"  # messages on channels: gpt-oss
    GRANITE = "granite"  # a JSON list behind <|tool_call|>
    PHI = "phi"  # the same with a closing token: Phi-4-mini
