"""Tests of files and batches with the official client, while processes are killed."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.campaign.batches import run_batch
from tests import forked
from tests.lazily import lazily

from . import paced
from .fleet_process import PATIENCE_S, wait_until
from .tenants import check_usage
from .test_api_document import BATCH_RECIPE, run_recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import openai
    from openai.types import Batch, responses

    from .fleet_process import FleetProcess
else:
    openai = lazily("openai")
    responses = lazily("openai.types.responses")

pytestmark = pytest.mark.slow

NUM_LINES, NUM_LINES_WHOLE = 12, 40
"""Number of lines; a process is killed after each fifth of them."""
MAX_TOKENS, MAX_TOKENS_WHOLE = 12, 160
ENDED = ("completed", "failed", "expired", "cancelled")


def chat_line(number: int) -> dict[str, Any]:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Tell me about {number}"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    url = "/v1/chat/completions"
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def create(client: openai.OpenAI, lines: list[dict[str, Any]], window: str = "24h") -> Batch:
    stored = client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=stored.id,
        endpoint=lines[0]["url"],
        completion_window=window,  # type: ignore[arg-type]
    )


def wait_ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """Wait until a batch ends, across restarts of the server."""
    found = batch

    def is_over() -> bool:
        nonlocal found
        with suppress(openai.APIConnectionError, openai.InternalServerError):
            found = client.batches.retrieve(batch.id)
        return found.status in ENDED

    wait_until(is_over, 3 * PATIENCE_S, "the batch ends")
    return found


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.mark.long
@pytest.mark.proof
async def test_a_batch_survives_the_death_of_every_process_and_of_the_supervisor(
    tmp_path: Path, whole: bool
) -> None:
    # One line at a time, so that the batch lasts until all kills.
    options = ("--set", "server.batches.concurrency=1", "--threads", "1")
    if whole:
        verdict = await run_batch(NUM_LINES_WHOLE, MAX_TOKENS_WHOLE, 1, 1, tmp_path, options)
    else:
        triolet = paced.COMMAND
        verdict = await run_batch(
            *(NUM_LINES, MAX_TOKENS, 1, 1, tmp_path, options, triolet, forked.Popen)
        )
    assert verdict.wrongs == []
    victims = {death.fault.victim for death in verdict.deaths}
    assert victims == {"server", "decode-0", "prefill-0", "supervisor"}


def run_mixed(client: openai.OpenAI) -> Batch:
    """Run a valid line and an invalid one, which must not affect the other."""
    bad = chat_line(1)
    bad["body"]["temperature"] = 99
    mixed = wait_ended(client, create(client, [chat_line(0), bad]))
    assert mixed.status == "completed"
    assert [line["custom_id"] for line in results(client, mixed.output_file_id)] == ["line-0"]
    [failed] = results(client, mixed.error_file_id)
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    return mixed


def run_responses(client: openai.OpenAI) -> Batch:
    """Run lines of the Responses API."""
    lines: list[dict[str, Any]] = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": "demo", "input": "Hello!", "max_output_tokens": 4, "temperature": 0},
        }
        for n in range(2)
    ]
    batch = wait_ended(client, create(client, lines))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == len(lines)
    single = client.responses.create(**lines[0]["body"])
    for line in results(client, batch.output_file_id):
        answered = responses.Response.model_validate(line["response"]["body"])
        assert answered.output_text == single.output_text
    return batch


@pytest.mark.promise
@pytest.mark.long
def test_files_and_batches_as_the_official_client_sees_them(
    start_fleet: Callable[..., FleetProcess], tmp_path: Path
) -> None:
    folders = ("--batch-dir", str(tmp_path / "jobs"), "--usage-dir", str(tmp_path / "usage"))
    fleet = start_fleet(*folders)
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        inputs = [
            {
                "custom_id": str(n),
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"input": f"text {n}"},
            }
            for n in range(5)
        ]
        batch = wait_ended(client, create(client, inputs))
        assert batch.status == "completed"
        vectors = results(client, batch.output_file_id)
        single = client.embeddings.create(model="demo", input="text 3", encoding_format="float")
        body = vectors[3]["response"]["body"]
        assert body["data"][0]["embedding"] == single.data[0].embedding

        responses = run_responses(client)
        mixed = run_mixed(client)

        wrong = wait_ended(client, create(client, [inputs[0], inputs[0]]))
        assert wrong.status == "failed"
        assert wrong.errors is not None
        assert wrong.errors.data is not None
        assert [error.code for error in wrong.errors.data] == ["duplicate_custom_id"]

        many = create(client, [chat_line(number) for number in range(300)])
        assert client.batches.cancel(many.id).status in ("cancelling", "cancelled")
        cancelled = wait_ended(client, many)
        assert cancelled.status == "cancelled"
        counts = cancelled.request_counts
        assert counts is not None
        told = results(client, cancelled.error_file_id)
        assert counts.completed + counts.failed == counts.total
        assert {line["error"]["code"] for line in told if line["error"]} <= {"batch_cancelled"}

        listed = [one.id for one in client.batches.list(limit=2)]
        assert listed == [many.id, wrong.id, mixed.id, responses.id, batch.id]
        kept = [one.id for one in client.files.list(limit=3)]
        assert batch.output_file_id in kept
        assert batch.input_file_id in kept
        assert client.files.retrieve(batch.input_file_id).filename == "input.jsonl"
        assert client.files.content(batch.input_file_id).content == jsonl(inputs)
        assert client.files.delete(batch.input_file_id).deleted
        for look in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                look(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_0")
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve("..%2F..%2Fetc%2Fpasswd")
    run_recipe(fleet, "python", BATCH_RECIPE)
    fleet.wait_at_rest()
    check_usage(fleet, tmp_path / "usage")
