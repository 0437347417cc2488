"""Request parameters without a field: accepted without effect, refused, or from other servers."""

from __future__ import annotations

from typing import Any, Final

IGNORED: Final = frozenset(
    "metadata user safety_identifier service_tier verbosity prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning reasoning_effort parallel_tool_calls".split()
)
"""Bookkeeping of the client, or hints. Those that name the user decide the version where a route
splits a model among several (server/rollouts/conversations.py)."""

UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "tools": ("tool calling (use /v1/chat/completions)", ([],)),
    "tool_choice": ("tool calling (use /v1/chat/completions)", ("none", "auto")),
    "functions": ("this name (use tools, at /v1/chat/completions)", ([],)),
    "function_call": ("this name (use tool_choice)", ("none", "auto")),
    "guided_decoding_backend": ("choosing the structured output backend", ("auto", "guidance")),
    "guided_whitespace_pattern": ("choosing the whitespace of JSON", ()),
    "structural_tag": ("a structural tag", ()),
    "grammar": ("this name (use structured_outputs.grammar)", ("",)),
    "regex": ("this name (use structured_outputs.regex)", ()),
    "modalities": (
        'a modality other than text (send ["text"], and convert the answer to speech yourself)',
        (["text"],),
    ),
    "audio": ("audio output (leave it out, and convert the answer to speech yourself)", ()),
    "prediction": ("predicted output (leave it out: it only saves time)", ()),
    "moderation": ("moderation (ask a model to judge the text, in a separate request)", ()),
    "web_search_options": (
        "web search (offer a function in tools, and search when the model calls it)",
        (),
    ),
    "store": ("storing completions (send false, and keep the answer yourself)", (False,)),
    "best_of": ("best_of other than 1 (request n answers with logprobs, and choose)", (1,)),
    "use_beam_search": ("beam search", (False,)),
    "suffix": ("a suffix (put it into prompt, as the model expects it)", ("",)),
    "prompt_logprobs": ("logprobs of the prompt", ()),
    "continue_final_message": ("continuing the last message", (False,)),
    "chat_template": ("a chat template in the request (it comes with the model)", ()),
    "background": ("background mode (stream the answer, or use /v1/batches)", (False,)),
    "conversation": ("a stored conversation (send all of its turns)", ()),
    "context_management": ("compaction (send fewer turns, or a summary of them)", ([],)),
    "max_tool_calls": ("a limit on tool calls (your program makes all calls)", ()),
    "truncation": ("truncating the input (leave out the oldest turns)", ("disabled",)),
    "generate": ("a request without an answer", (True,)),
    # Extensions of vLLM, SGLang and llama.cpp that change what is generated or how it is written.
    "adaptive_target": ("adaptive sampling", (-1, -1.0)),
    "allowed_token_ids": ("a list of allowed tokens", ([],)),
    "bad_words": ("forbidden words", ([],)),
    "custom_logit_processor": ("custom logit processors", ()),
    "documents": ("documents (put their text into a message)", ([],)),
    "dry_multiplier": ("DRY sampling", (0, 0.0)),
    "dynatemp_range": ("dynamic temperature", (0, 0.0)),
    "early_stopping": ("beam search", (False,)),
    "ebnf": ("this name (use structured_outputs.grammar)", ()),
    "generation_prompt": ("a different start of the assistant's turn", ("",)),
    "id_slot": ("slot selection", (-1,)),
    "image_data": ("images (describe them in the text)", ([],)),
    "input_ids": ("token ids as a prompt here (use POST /v1/completions)", ()),
    "input_embeds": ("embeddings as a prompt", ()),
    "json_schema": ("this name (use response_format or structured_outputs.json)", ()),
    "length_penalty": ("beam search", (1, 1.0)),
    "logits_processors": ("logit processors", ([],)),
    "logprob_token_ids": ("logprobs of tokens by their ids", ()),
    "lora": ("this name (name the adapter in model, as MODEL:ADAPTER)", ([],)),
    "lora_path": ("this name (name the adapter in model, as MODEL:ADAPTER)", ()),
    "mirostat": ("mirostat sampling", (0,)),
    "n_cmpl": ("this name (use n)", (1,)),
    "n_indent": ("minimum indentation", (0,)),
    "n_predict": ("this name (use max_tokens)", (-1,)),
    "n_probs": ("this name (use logprobs)", (0,)),
    "prompt_embeds": ("embeddings as a prompt", ()),
    "repeat_penalty": ("this name (use repetition_penalty)", (1, 1.0)),
    "repetition_detection": ("stopping at repeated tokens", ()),
    "return_hidden_states": ("hidden states in the answer", (False,)),
    "return_prompt_text": ("the prompt in the answer", (False,)),
    "return_prompt_token_ids": ("the prompt in the answer (see POST /tokenize)", (False,)),
    "return_tokens": ("this name (use return_token_ids)", (False,)),
    "return_tokens_as_token_ids": ("this token format (use return_token_ids)", (False,)),
    "samplers": ("a sampler order", ()),
    "stop_regex": ("stopping at a regular expression", ()),
    "top_n_sigma": ("top-n-sigma sampling", (-1, -1.0, 0, 0.0)),
    "truncate_prompt_tokens": ("truncating the prompt", ()),
    "typical_p": ("typical sampling", (1, 1.0)),
    "watermarking": ("watermarking", (False,)),
    "xtc_probability": ("XTC sampling", (0, 0.0)),
}
"""Refused parameters, by name: a description, and the values that are accepted because they change
nothing."""

OWN_FUNCTION: Final = " (offer a function instead, and run it in your program)"
PARTS: Final = {
    **dict.fromkeys(("image", "image_url", "input_image"), "describe the image in a text part"),
    **dict.fromkeys(("audio", "input_audio"), "send the transcript as a text part"),
}
"""What to send instead of a part that is not text, by its type. For others: their text."""

EXTENSIONS: Final = frozenset(
    # vLLM
    "ec_transfer_params include_reasoning kv_transfer_params media_io_kwargs mm_processor_kwargs "
    "request_id return_mm_kwargs return_token_offsets routed_experts_prompt_start session_id "
    "spaces_between_special_tokens truncation_side vllm_xargs "
    # SGLang
    "bootstrap_host bootstrap_port bootstrap_room custom_params data_parallel_rank "
    "disagg_prefill_dp_rank extra_key images_config max_dynamic_patch min_dynamic_patch "
    "ngram_corpus_id no_stop_trim rid return_cached_tokens_details return_meta_info "
    "return_routed_experts routed_dp_rank routed_experts_start_len separate_reasoning "
    "session_params stream_reasoning use_audio_in_video "
    # llama.cpp
    "adaptive_decay backend_sampling cache_prompt chat_format chat_parser dry_allowed_length "
    "dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent grammar_lazy min_keep "
    "mirostat_eta mirostat_tau n_cache_reuse n_discard n_keep parse_tool_calls "
    "post_sampling_probs reasoning_format repeat_last_n response_fields return_progress "
    "sse_ping_interval t_max_predict_ms timings_per_token xtc_threshold "
    # benchmark clients and routers
    "nvext provider route transforms".split()
)
"""Extensions of other servers that change no promise or only refine what UNSUPPORTED refuses.
Metrics count them by name; all other unknown names are counted as OTHER_EXTENSION."""
OTHER_EXTENSION: Final = "other"
