"""Tests of the package's basic types: ids, sampling parameters, config and errors."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from triolet import errors
from triolet.config import MAX_NUM_SEQS, EngineConfig, LinkConfig, ServerConfig, WorkerConfig
from triolet.errors import ConfigError, RequestError, TrioletError
from triolet.ids import (
    REQUEST_ID_BYTES,
    AttemptKey,
    PeerId,
    Role,
    new_epoch,
    new_request_id,
    shown_epoch,
)
from triolet.loopback import is_loopback
from triolet.sampling import MAX_SEED, SamplingParams, end_token_ids, is_end_token

SERVER = ServerConfig(model_dir="", model_name="", prefill_addresses=(), decode_addresses=())


def test_ids_are_random_and_never_zero() -> None:
    assert len({new_request_id() for _ in range(1000)}) == 1000
    assert len(new_request_id()) == REQUEST_ID_BYTES
    epochs = {new_epoch() for _ in range(1000)}
    assert len(epochs) == 1000
    assert all(0 < epoch < 2**64 for epoch in epochs)


def test_two_lives_of_a_worker_have_two_names() -> None:
    first, second = (PeerId(Role.DECODE, "decode-0", epoch) for epoch in (1, 2))
    assert first.identity() != second.identity()
    assert str(first) == f"decode-0@{shown_epoch(1)}" != str(second)
    assert "0000000000000001" not in str(first), "only peers may see an epoch"


def test_an_attempt_names_itself_in_hexadecimal() -> None:
    assert str(AttemptKey(bytes(16), 2)) == "0" * 32 + "/2"


def test_every_request_has_a_seed() -> None:
    seeds = {SamplingParams().seed for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize(
    ("params", "has_penalties"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0, logit_bias=((1, 5.0),)), False),
        (SamplingParams(presence_penalty=0.1), True),
        (SamplingParams(frequency_penalty=-0.1), True),
        (SamplingParams(repetition_penalty=1.1), True),
    ],
)
def test_penalties_are_noticed(params: SamplingParams, has_penalties: bool) -> None:
    assert params.has_penalties is has_penalties


def test_end_tokens_follow_ignore_eos_and_min_tokens() -> None:
    params = SamplingParams(stop_token_ids=(7,), min_tokens=2)
    assert end_token_ids(params, (1, 2)) == {1, 2, 7}
    assert not is_end_token(params, (1, 2), position=1, token_id=7)
    assert is_end_token(params, (1, 2), position=2, token_id=7)
    ignoring = dataclasses.replace(params, ignore_eos=True)
    assert end_token_ids(ignoring, (1, 2)) == {7}
    assert not is_end_token(ignoring, (1, 2), position=2, token_id=1)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LinkConfig, "heartbeat_interval_s", 0),
        (LinkConfig, "load_report_interval_s", 0),
        (LinkConfig, "load_report_interval_s", 0.6),
        (ServerConfig, "requests_per_turn", 0),
        (ServerConfig, "text_processes", 0),
        (ServerConfig, "text_timeout_s", 0.0),
        (LinkConfig, "peer_timeout_s", 0.9),
        (LinkConfig, "lease_ttl_s", 1.5),
        (LinkConfig, "kv_ring_bytes", 1),
        (LinkConfig, "kv_chunk_bytes", 0),
        (LinkConfig, "kv_window_bytes", 0),
        (EngineConfig, "block_size", 0),
        (EngineConfig, "max_num_seqs", 0),
        (ServerConfig, "drain_timeout_s", math.inf),
        (ServerConfig, "drain_timeout_s", -1.0),
        (EngineConfig, "threads", 0),
        (EngineConfig, "max_num_seqs", MAX_NUM_SEQS + 1),
        (EngineConfig, "max_num_batched_tokens", 3),
    ],
)
def test_a_setting_that_cannot_work_is_named(config: type, field: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"^{field} is .*; allowed: |`\$\.{field}`$"):
        msgspec.convert({field: value}, config)


@pytest.mark.parametrize("config", [LinkConfig, EngineConfig, ServerConfig, WorkerConfig])
def test_config_is_frozen(config: type) -> None:
    assert dataclasses.is_dataclass(config)
    assert config.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.invalid_request("no", "n"), 400, "invalid_request_error"),
        (errors.overloaded("full", 2.0), 503, "overloaded"),
        (errors.no_worker("none"), 503, "no_worker"),
        (errors.draining(), 503, "draining"),
        (errors.deadline_exceeded("late"), 504, "deadline_exceeded"),
        (errors.server_error(), 500, "server_error"),
    ],
)
def test_request_errors_know_their_status(error: RequestError, status: int, code: str) -> None:
    assert isinstance(error, TrioletError)
    assert (error.status, error.code) == (status, code)
    assert (error.retry_after_s is not None) == (status == 503)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_server_for_other_machines_has_to_be_meant() -> None:
    options = {"model_dir": "", "model_name": "", "prefill_addresses": (), "decode_addresses": ()}
    with pytest.raises(ConfigError, match="--allow-remote-clients"):
        ServerConfig(host="0.0.0.0", **options)  # type: ignore[arg-type]
    ServerConfig(host="0.0.0.0", allow_remote_clients=True, **options)  # type: ignore[arg-type]
