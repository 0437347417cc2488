"""Converts request fields to sampling parameters, and formats logprobs for chats and completions.
Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from triolet.errors import invalid_request
from triolet.sampling import MAX_SEED, Grammar, ReasoningTokens, SamplingParams, new_seed

from ..contract.generation import CacheAsk, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..text.model_files import SamplingDefaults
    from .schemas import GenerationFields, SamplingFields
    from .served_models import ServedModel


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
    reasoning: ReasoningTokens | None = None,
) -> SamplingParams:
    """Return the sampling parameters of the first choice."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_request(f"min_tokens exceeds max_tokens ({max_tokens})", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(fields.temperature, defaults.temperature),
        top_p=_or(fields.top_p, defaults.top_p),
        # Other servers use -1 for off.
        top_k=defaults.top_k if fields.top_k is None else max(0, fields.top_k),
        min_p=_or(fields.min_p, defaults.min_p),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=fields.logit_bias,
        # The API allows negative seeds; the generator takes 63 bits.
        seed=new_seed() if fields.seed is None else fields.seed & MAX_SEED,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        grammar=grammar,
        reasoning=reasoning,
    )


def cache_ask(fields: GenerationFields, params: SamplingParams) -> CacheAsk | None:
    """Return the request's response cache settings; None for none."""
    if fields.response_cache is None:
        return None
    return CacheAsk(
        may_find=fields.response_cache == "allow",
        is_reproducible=params.temperature == 0 or fields.seed is not None,
    )


def of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one choice: the same with another seed."""
    return replace(params, seed=(params.seed + index) & MAX_SEED)


def check_token_ids(fields: SamplingFields, model: ServedModel) -> None:
    """Raise RequestError for a token id that the model does not have."""
    check_ids([token_id for token_id, _ in fields.logit_bias], model, "logit_bias")
    check_ids(fields.stop_token_ids, model, "stop_token_ids")


def check_ids(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise RequestError for a token id outside the model's vocabulary."""
    largest, size = max(ids, default=0), model.text.vocab_size
    if largest >= size:
        raise invalid_request(
            f"{param} has the token id {largest}; ids of model {model.name} are below {size}", param
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    """Return one entry of `logprobs.content` of a chat choice."""
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw),
        "top_logprobs": [
            {"token": text, "logprob": logprob, "bytes": list(raw)}
            for _, text, raw, logprob in token.top
        ],
    }


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the value of `logprobs.content` of a chat choice."""
    return [chat_logprob(token) for token in tokens]


def completion_top(token: TokenLogprob) -> dict[str, float]:
    """Return one entry of `logprobs.top_logprobs` of a plain completion."""
    return {text: logprob for _, text, _, logprob in token.top}


def completion_logprobs(
    tokens: Iterable[TokenLogprob], offset: int, tops: Sequence[object]
) -> dict[str, Any]:
    """Return the value of `logprobs` of a plain completion.

    Args:
      tokens: the tokens in order.
      offset: number of characters of the completion's text before the first token.
      tops: the alternatives of each token.
    """
    names, logprobs, offsets = [], [], []
    for token in tokens:
        names.append(token.text)
        logprobs.append(token.logprob)
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }
