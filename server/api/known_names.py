"""Names of parameters without a field: taken without effect, refused, or of other servers."""

from __future__ import annotations

from typing import Any, Final

IGNORED: Final = frozenset(
    "metadata user safety_identifier service_tier verbosity prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning reasoning_effort parallel_tool_calls".split()
)
"""Bookkeeping of the client's, or hints that change no promise."""

UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "tools": ("calling tools (chats do, at /v1/chat/completions)", ([],)),
    "tool_choice": ("calling tools (chats do, at /v1/chat/completions)", ("none", "auto")),
    "functions": ("this name (it is tools, at /v1/chat/completions)", ([],)),
    "function_call": ("this name (it is tool_choice)", ("none", "auto")),
    "guided_decoding_backend": ("choosing what constrains output", ("auto", "guidance")),
    "guided_whitespace_pattern": ("choosing the whitespace of JSON", ()),
    "structural_tag": ("a structural tag", ()),
    "grammar": ("this name (it is structured_outputs.grammar)", ("",)),
    "regex": ("this name (it is structured_outputs.regex)", ()),
    "modalities": (
        'a modality other than text (ask for ["text"], and speak the answer yourself)',
        (["text"],),
    ),
    "audio": ("spoken output (leave it out, and speak the text of the answer yourself)", ()),
    "prediction": ("predicted output (leave it out: it only saves time)", ()),
    "moderation": ("moderation (ask a model to judge the text, in a request of its own)", ()),
    "web_search_options": (
        "web search (offer a function in tools, and search when it is called)",
        (),
    ),
    "store": ("storing completions (send false, and keep the answer yourself)", (False,)),
    "best_of": ("best_of other than 1 (ask for n answers with logprobs, and choose)", (1,)),
    "use_beam_search": ("beam search", (False,)),
    "suffix": ("a suffix (write it into prompt, as the model expects it)", ("",)),
    "prompt_logprobs": ("logprobs of the prompt", ()),
    "continue_final_message": ("continuing the last message", (False,)),
    "chat_template": ("a chat template in the request (it comes with the model)", ()),
    "background": ("answering in the background (stream the answer, or use /v1/batches)", (False,)),
    "conversation": ("a stored conversation (send all of its turns)", ()),
    "context_management": ("compaction (send fewer turns, or a summary of them)", ([],)),
    "max_tool_calls": ("a bound of calls (none is made here: your program runs the functions)", ()),
    "truncation": ("truncating the input (leave out the oldest turns)", ("disabled",)),
    "generate": ("a request without an answer", (True,)),
    # Extensions of vLLM, SGLang and llama.cpp that change what is generated or how it is written.
    "adaptive_target": ("adaptive sampling", (-1, -1.0)),
    "allowed_token_ids": ("a list of allowed tokens", ([],)),
    "bad_words": ("forbidden words", ([],)),
    "custom_logit_processor": ("a processor of logits", ()),
    "documents": ("documents beside the messages (put their text into a message)", ([],)),
    "dry_multiplier": ("DRY sampling", (0, 0.0)),
    "dynatemp_range": ("dynamic temperature", (0, 0.0)),
    "early_stopping": ("beam search", (False,)),
    "ebnf": ("this name (it is structured_outputs.grammar)", ()),
    "generation_prompt": ("another opening of the assistant's turn", ("",)),
    "id_slot": ("choosing a slot", (-1,)),
    "image_data": ("images (describe them in the text)", ([],)),
    "input_ids": ("a prompt of token ids beside messages (see POST /v1/completions)", ()),
    "input_embeds": ("a prompt of vectors", ()),
    "json_schema": ("this name (it is response_format or structured_outputs.json)", ()),
    "length_penalty": ("beam search", (1, 1.0)),
    "logits_processors": ("processors of logits", ([],)),
    "logprob_token_ids": ("logprobs of tokens by their ids", ()),
    "lora": ("this name (an adapter is part of model, as MODEL:ADAPTER)", ([],)),
    "lora_path": ("this name (an adapter is part of model, as MODEL:ADAPTER)", ()),
    "mirostat": ("mirostat sampling", (0,)),
    "n_cmpl": ("this name (it is n)", (1,)),
    "n_indent": ("a least indentation", (0,)),
    "n_predict": ("this name (it is max_tokens)", (-1,)),
    "n_probs": ("this name (it is logprobs)", (0,)),
    "prompt_embeds": ("a prompt of vectors", ()),
    "repeat_penalty": ("this name (it is repetition_penalty)", (1, 1.0)),
    "repetition_detection": ("an end at repeated tokens", ()),
    "return_hidden_states": ("hidden states in the answer", (False,)),
    "return_prompt_text": ("the prompt in the answer", (False,)),
    "return_prompt_token_ids": ("the prompt in the answer (see POST /tokenize)", (False,)),
    "return_tokens": ("this name (it is return_token_ids)", (False,)),
    "return_tokens_as_token_ids": ("this form of tokens (see return_token_ids)", (False,)),
    "samplers": ("an order of samplers", ()),
    "stop_regex": ("an expression that ends the text", ()),
    "top_n_sigma": ("top-n-sigma sampling", (-1, -1.0, 0, 0.0)),
    "truncate_prompt_tokens": ("truncating the prompt", ()),
    "typical_p": ("typical sampling", (1, 1.0)),
    "watermarking": ("a watermark", (False,)),
    "xtc_probability": ("XTC sampling", (0, 0.0)),
}
"""By name: what it would be, and the values that ask for nothing more than happens anyway."""

OWN_FUNCTION: Final = " (offer a function, and do in your program what it is called for)"
PARTS: Final = {
    **dict.fromkeys(("image", "image_url", "input_image"), "describe the image in a text part"),
    **dict.fromkeys(("audio", "input_audio"), "send what is said as a text part"),
}
"""By the type of a part that is no text: what to send. Of all others, their text."""

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
"""Extensions of other servers that change no promise, or only refine what UNSUPPORTED refuses.
Metrics count them by name; every other unknown name is counted as OTHER_EXTENSION."""
OTHER_EXTENSION: Final = "other"
