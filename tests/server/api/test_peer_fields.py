"""Tests of fields that clients of vLLM, SGLang and llama.cpp send by default, and of the requests
of benchmark clients."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.schemas import (
    EXTENSIONS,
    ChatRequest,
    CompletionRequest,
    StrictModel,
    read_request,
    take_unknown,
)
from tests.server.support.surface import MODEL, surface
from triolet.errors import RequestError

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"prompt": "hi"}

SHARED: dict[str, Any] = {
    # vLLM
    "allowed_token_ids": None, "bad_words": [], "cache_salt": None, "ec_transfer_params": None,
    "ignore_eos": False, "include_stop_str_in_output": False, "kv_transfer_params": None,
    "length_penalty": 1.0, "logprob_token_ids": None, "min_tokens": 0, "priority": 0,
    "prompt_logprobs": None, "repetition_detection": None, "request_id": "x",
    "return_mm_kwargs": True, "return_prompt_text": None, "return_token_ids": None,
    "return_token_offsets": False, "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0, "session_id": None, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "stop": [], "stop_token_ids": [],
    "structured_outputs": None, "truncate_prompt_tokens": None, "truncation_side": None,
    "use_beam_search": False, "vllm_xargs": None, "watermarking": None,
    # SGLang
    "bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None,
    "custom_logit_processor": None, "custom_params": None, "data_parallel_rank": None,
    "ebnf": None, "images_config": None, "lora_path": None, "min_p": 0.0, "no_stop_trim": False,
    "regex": None, "repetition_penalty": 1.0, "return_cached_tokens_details": False,
    "return_hidden_states": False, "return_routed_experts": False, "rid": None,
    "routed_experts_start_len": 0, "session_params": None, "stop_regex": None, "top_k": -1,
    # llama.cpp
    "adaptive_decay": 0.9, "adaptive_target": -1.0, "backend_sampling": False,
    "cache_prompt": True, "chat_format": 0, "dry_allowed_length": 2, "dry_base": 1.75,
    "dry_multiplier": 0.0, "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n"],
    "dynatemp_exponent": 1.0, "dynatemp_range": 0.0, "generation_prompt": "", "grammar": "",
    "grammar_lazy": False, "id_slot": -1, "lora": [], "min_keep": 0, "mirostat": 0,
    "mirostat_eta": 0.1, "mirostat_tau": 5.0, "n_cache_reuse": 0, "n_cmpl": 1, "n_discard": 0,
    "n_indent": 0, "n_keep": 0, "n_predict": -1, "n_probs": 0, "parse_tool_calls": True,
    "post_sampling_probs": False, "reasoning_format": "none", "repeat_last_n": 64,
    "repeat_penalty": 1.0, "response_fields": [], "return_progress": False,
    "return_tokens": False, "sse_ping_interval": 15, "t_max_predict_ms": -1,
    "timings_per_token": False, "top_n_sigma": -1.0, "typical_p": 1.0, "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
}  # fmt: skip
"""The value that each server uses if a client sends none, by name."""
OF_CHAT: dict[str, Any] = {
    "add_generation_prompt": True, "add_special_tokens": False, "chat_template": None,
    "chat_template_kwargs": None, "continue_final_message": False, "disagg_prefill_dp_rank": None,
    "documents": None, "echo": False, "extra_key": None, "include_reasoning": True,
    "input_ids": None, "max_dynamic_patch": None, "media_io_kwargs": None,
    "min_dynamic_patch": None, "mm_processor_kwargs": None, "ngram_corpus_id": None,
    "return_meta_info": False, "return_prompt_token_ids": False, "routed_dp_rank": None,
    "separate_reasoning": True, "stream_reasoning": True, "tool_choice": "none",
    "use_audio_in_video": False,
}  # fmt: skip
OF_COMPLETIONS: dict[str, Any] = {
    "add_special_tokens": True, "best_of": None, "echo": False, "prompt_embeds": None,
    "suffix": None,
}  # fmt: skip
DEFAULTS = [
    pytest.param(kind, usual, name, value, id=f"{kind.__name__}-{name}")
    for kind, usual, own in (
        (ChatRequest, HI, OF_CHAT),
        (CompletionRequest, PROMPT, OF_COMPLETIONS),
    )
    for name, value in (SHARED | own).items()
]

CHANGES: dict[str, Any] = {
    "adaptive_target": 0.5, "add_special_tokens": True, "echo": True, "generation_prompt": "<",
    "input_ids": [1], "logprob_token_ids": [1], "n_cmpl": 2, "n_indent": 4,
    "repetition_detection": {"max_pattern_size": 3}, "return_prompt_text": True,
    "return_prompt_token_ids": True, "return_tokens": True, "watermarking": True,
}  # fmt: skip
"""Values that would change a chat's answer."""


@pytest.mark.parametrize(("kind", "usual", "name", "value"), DEFAULTS)
def test_the_defaults_of_peers_change_nothing(
    kind: type[StrictModel], usual: dict[str, Any], name: str, value: object
) -> None:
    body = {**usual, name: value}
    ignored = take_unknown(kind, body)
    read_request(kind, body)
    assert set(ignored) <= EXTENSIONS


@pytest.mark.parametrize(("name", "value"), CHANGES.items())
def test_an_extension_that_would_change_the_answer_is_refused(name: str, value: object) -> None:
    body = {**HI, name: value}
    take_unknown(ChatRequest, body)
    with pytest.raises(RequestError) as refused:
        read_request(ChatRequest, body)
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


BENCHMARKS: dict[str, tuple[dict[str, Any], str | None]] = {
    "guidellm": (
        {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 9,
            "stop": None,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        },
        None,
    ),
    "aiperf": (
        {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 9,
            "ignore_eos": True,
            "min_tokens": 9,
            "nvext": {"ignore_eos": True},
            "messages": [{"role": "user", "name": "user", "content": "hi"}],
        },
        "nvext",
    ),
    "inference-perf": (
        {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 9,
            "ignore_eos": True,
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "ok",
                    "reasoning_content": "hm",
                    "reasoning": "hm",
                },
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "description": None,
                        "parameters": {"type": "object"},
                    },
                }
            ],
        },
        None,
    ),
}
"""By client: the body of a streamed chat, and the names in it that are ignored."""


@pytest.mark.parametrize(("body", "ignored"), BENCHMARKS.values(), ids=BENCHMARKS)
async def test_benchmark_clients_are_answered(body: dict[str, Any], ignored: str | None) -> None:
    async with surface() as server:
        answer = await server.post(CHAT, body)
        assert (await server.request("GET", "/health")).status == 200
    assert answer.status == 200
    assert answer.headers.get("x-triolet-ignored") == ignored
    usage = [event["usage"] for event in answer.events[:-1] if event.get("usage")]
    assert usage[-1]["completion_tokens"] == len("Hello there")
