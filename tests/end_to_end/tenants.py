"""Test helpers for fleets with tenants: the tenants file, API keys, and checks of charges."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest

from loadtest.campaign.answers import key_headers
from tests.server.slo.ledger import availability_by
from triolet.tenants.api_keys import digest_of
from triolet.usage_database import usage_by

from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from loadtest.campaign.client import Story

    from .fleet_process import FleetProcess

OPERATOR: Final = "root"
MODEL: Final = "served"
SERVER_CODES: Final = frozenset({"overloaded", "no_worker", "draining", "quarantined"})
"""Codes of refusals with a status of 500 or more."""
NAMED: Final = ("--model-name", MODEL)
"""Options of a fleet, so that the file's prices apply to its model."""


def key_of(tenant: str) -> str:
    """Return a tenant's key."""
    return f"sk-triolet-{tenant}"


def headers_of(tenant: str) -> dict[str, str]:
    """Return the authorization headers of a key."""
    return key_headers(key_of(tenant))


def write_tenants(path: Path, plans: Mapping[str, str]) -> Path:
    """Write a tenants file with a plan for each tenant, and an operator without limits.

    Args:
      path: path of the file.
      plans: lines of TOML by tenant.
    """
    lines = [f'cache_secret = "{"0" * 64}"']
    for name, plan in {**plans, OPERATOR: ""}.items():
        lines += [f"[plans.{name}]", plan, f"[tenants.{name}]", f'plan = "{name}"']
        lines += [f'keys = ["sha256:{digest_of(key_of(name))}"]']
        lines += ['role = "operator"'] if name == OPERATOR else []
    lines += [f"[prices.{MODEL}]", "prompt = 2.0", "cached_prompt = 0.5", "completion = 3.0"]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


def usage_of(fleet: FleetProcess, tenant: str) -> dict[str, Any]:
    """Return a tenant's usage as reported by the server."""
    answer = fleet.client.get("/v1/usage", headers=headers_of(tenant)).raise_for_status()
    usage: dict[str, Any] = answer.json()
    return usage


def tokens_told(stories: Iterable[Story]) -> Counter[str]:
    """Return the tokens that clients were told they used, by key."""
    told: Counter[str] = Counter()
    for story in stories:
        assert story.answer is not None, story.failure
        told[story.ask.key] += story.answer.prompt_tokens + story.answer.completion_tokens
    return told


def check_charges(fleet: FleetProcess, tenants: Iterable[str], stories: Iterable[Story]) -> None:
    """Check that tenants are charged what their clients were told, and that nothing is reserved.

    Args:
      fleet: the fleet that answered exactly these requests of the tenants.
      tenants: the tenants.
      stories: all their requests.
    """
    stories = list(stories)
    told = tokens_told(stories)
    wanted = {tenant: told.pop(key_of(tenant)) for tenant in tenants}
    assert not told

    def charged() -> dict[str, int]:
        return {tenant: usage_of(fleet, tenant)["this_month"]["tokens"] for tenant in wanted}

    wait_until(lambda: charged() == wanted, PATIENCE_S, "everything is charged")
    fleet.wait_at_rest()
    assert charged() == wanted
    accounts = {tenant: usage_of(fleet, tenant) for tenant in wanted}
    assert {account["in_flight"] for account in accounts.values()} == {0}
    assert fleet.metric("triolet_quota_reservations") == 0
    assert fleet.metric("triolet_quota_open_sequences") == 0
    for tenant, account in accounts.items():
        counted = fleet.metric("triolet_tenant_cost_total", tenant=tenant)
        assert counted == pytest.approx(account["this_month"]["spent"])
        assert counted > 0
    names = {story.ask.name for story in stories}

    def ends() -> list[dict[str, Any]]:
        logged = fleet.log_events("request_ended")
        return [end for end in logged if end["client_request_id"] in names]

    wait_until(lambda: len(ends()) >= len(stories), PATIENCE_S, "the log has every end")
    spent = sum(account["this_month"]["spent"] for account in accounts.values())
    assert sum(end["cost"] for end in ends()) == pytest.approx(spent)
    used = sum(end["prompt_tokens"] + end["completion_tokens"] for end in ends())
    assert used == sum(wanted.values())


def check_usage(fleet: FleetProcess, folder: Path) -> None:
    """Check that a fleet's usage ledger, metrics and log agree about its requests.

    Args:
      fleet: an idle fleet; its server must not have been restarted.
      folder: directory of the ledger.
    """
    ended = fleet.samples("triolet_requests_total")
    counted = Counter({sample.labels["outcome"]: int(sample.value) for sample in ended})
    kinds = ("prompt", "cached_prompt", "completion")
    tokens = [fleet.metric(f"triolet_{kind}_tokens_total") for kind in kinds]

    def recorded() -> list[tuple[Any, ...]]:
        return usage_by(str(folder), ["outcome"], since=0.0)

    def lines() -> list[dict[str, Any]]:
        return list(fleet.log_events("request_ended"))

    def are_written() -> bool:
        num_logged = counted.total() - counted["embedded"]
        return sum(row[1] for row in recorded()) + len(lines()) >= counted.total() + num_logged

    wait_until(are_written, PATIENCE_S, "records and lines")
    assert {row[0]: row[1] for row in recorded()} == counted
    assert [sum(row[column] for row in recorded()) for column in (2, 3, 4)] == tokens
    # Embedding requests are logged at level debug.
    written = [row for row in recorded() if row[0] != "embedded"]
    assert Counter(line["outcome"] for line in lines()) == {row[0]: row[1] for row in written}
    for kind, column in (("prompt_tokens", 2), ("completion_tokens", 4)):
        assert sum(line[kind] for line in lines()) == sum(row[column] for row in written)
    assert fleet.metric("triolet_usage_records_dropped_total") == 0
    check_objectives(fleet, folder)


def check_objectives(fleet: FleetProcess, folder: Path) -> None:
    """Check that the counts of the shipped objectives equal a ledger's and the histograms'.

    Args:
      fleet: an idle fleet with one model; its server must not have been restarted.
      folder: directory of the ledger, with all requests of the fleet.
    """

    def counted(family: str, slo: str, *labels: str) -> dict[tuple[str, ...], list[int]]:
        found: dict[tuple[str, ...], list[int]] = {}
        for position, which in enumerate(("good", "events")):
            for sample in fleet.samples(f"triolet_slo_{family}{which}_total"):
                if sample.labels["slo"] == slo:
                    key = tuple(sample.labels[label] for label in labels)
                    found.setdefault(key, [0, 0])[position] += int(sample.value)
        return found

    wanted = availability_by(str(folder), ["model", "version", "class"])
    by_tenant = availability_by(str(folder), ["tenant"])
    refused = {
        sample.labels["class"]: int(sample.value)
        for sample in fleet.samples("triolet_requests_rejected_total")
        if sample.labels["code"] in SERVER_CODES and sample.labels["class"] != "batch"
    }
    for name, count in refused.items():
        [(model, version)] = {key[:2] for key in wanted}
        wanted.setdefault((model, version, name), [0, 0])[1] += count
    assert counted("", "availability", "model", "version", "class") == wanted
    if not any(refused.values()):
        by_tenant.pop(("",), None)
        assert counted("tenant_", "availability", "tenant") == by_tenant
    for slo, histogram, limit in (
        ("first-token", "triolet_time_to_first_token_seconds", "2.5"),
        ("queue-wait", "triolet_class_queue_seconds", "1.0"),
    ):
        buckets = [s for s in fleet.samples(f"{histogram}_bucket") if s.labels["le"] == limit]
        counts = fleet.samples(f"{histogram}_count")
        if any(name == "batch" for _, _, name in wanted) and "class" not in counts[0].labels:
            continue  # this histogram has batch lines, too
        sums = [
            int(sum(one.value for one in samples if one.labels.get("class") != "batch"))
            for samples in (buckets, counts)
        ]
        assert counted("", slo).get((), [0, 0]) == sums, slo
