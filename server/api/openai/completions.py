"""POST /v1/completions: prompts in, their continuations out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from triolet.errors import invalid_request

from ..body import read_fields
from ..constraints import read_grammar
from ..generate import Plan, check_fields, head, stream_response, whole_response
from ..logprobs import completion_logprobs
from ..overload import refuse_early
from ..sampling import unknown_token
from ..schemas import CompletionRequest
from .chunks import CompletionChunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quart import Response

    from ..schemas import Prompt
    from ..services import Services
    from ..stream import Answer

DEFAULT_MAX_TOKENS: Final = 16
"""The API's own default; a plain completion may have no natural end."""


async def completions(services: Services) -> Response:
    """Continue one or several prompts."""
    fields = await read_fields(CompletionRequest, services)
    check_fields(fields, services)
    refuse_early(fields, services)
    if fields.echo and fields.logprobs is not None:
        raise invalid_request(
            "with echo would need those of the prompt, which are not computed; leave one away",
            "logprobs",
        )
    if len(fields.prompt) > services.config.max_prompts:
        raise invalid_request(f"at most {services.config.max_prompts} are served at once", "prompt")
    grammar = await read_grammar(fields, services)
    prompts = [await _prompt_ids(prompt, services) for prompt in fields.prompt]
    plan = Plan(
        fields=fields,
        prompts=prompts,
        max_tokens=fields.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        param="prompt",
        logprobs=fields.logprobs,
        grammar=grammar,
    )
    echoes = await _echoes(fields, prompts, services)
    fields_of_answer = head("text_completion", "cmpl", services)
    if fields.stream:
        return await stream_response(
            plan, services, fields_of_answer, partial(CompletionChunks, echoes=echoes)
        )
    return await whole_response(plan, services, fields_of_answer, partial(_choice, fields, echoes))


async def _prompt_ids(prompt: Prompt, services: Services) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(await services.text.encode(prompt))
    if (largest := max(prompt)) >= services.text.vocab_size:
        raise unknown_token(largest, services.text.vocab_size, "prompt")
    return prompt


async def _echoes(
    fields: CompletionRequest, prompts: Sequence[tuple[int, ...]], services: Services
) -> list[str]:
    """Return what precedes each choice's text: its prompt if asked for, else nothing."""
    echoes = []
    for prompt, ids in zip(fields.prompt, prompts, strict=True):
        text = ""
        if fields.echo:
            text = prompt if isinstance(prompt, str) else await services.text.decode(ids)
        echoes += [text] * (fields.n or 1)
    return echoes


def _choice(
    fields: CompletionRequest, echoes: Sequence[str], index: int, answer: Answer
) -> dict[str, Any]:
    logprobs = completion_logprobs(answer.logprobs, 0) if fields.logprobs is not None else None
    ids = {"token_ids": answer.token_ids} if fields.return_token_ids else {}
    return {
        "index": index,
        "text": echoes[index] + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finished.reason,
        **ids,
    }
