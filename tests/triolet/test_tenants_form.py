"""Tests of parsing tenants files: every field is read, and each mistake gets an error that names
it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import pytest

from triolet.errors import ConfigError
from triolet.service_class import ANYWHERE, Placement, ServiceClass
from triolet.tenants.api_keys import digest_of
from triolet.tenants.form import MAX_TENANTS, read_tenants
from triolet.tenants.plans import NO_PRICES, Plan, Prices, TenantRole, Tenants

SECRET: Final = 'cache_secret = "' + "0f" * 32 + '"\n'
ONE: Final = f'"sha256:{digest_of("one")}"'
TWO: Final = f'"sha256:{digest_of("two")}"'
WHOLE: Final = f"""{SECRET}
[plans.gold]
weight = 4
classes = ["critical", "default"]
requests_per_minute = 60
tokens_per_minute = 100_000
max_concurrent = 8
max_running = 4
max_context_tokens = 4096
max_output_tokens = 1024
kv_share = 0.5
cache_share = 0.25
budget = 12.5
budget_alerts = [1.0, 0.5]

[tenants.alice]
plan = "gold"
keys = [{ONE}, {{ digest = {TWO}, until = 2030-01-31T12:00:00Z }}]

[tenants.root]
role = "operator"
disabled = true
auto = ["small", "large"]

[prices."org/model-1.5"]
prompt = 0.5
cached_prompt = 0.05
completion = 2
"""


def read(text: str) -> Tenants:
    return read_tenants(text.encode(), "tenants.toml")


def test_every_field_is_read() -> None:
    tenants = read(WHOLE)
    alice, root = tenants.by_name["alice"], tenants.by_name["root"]
    assert alice.plan == Plan(
        name="gold",
        weight=4.0,
        classes=(ServiceClass.CRITICAL, ServiceClass.DEFAULT),
        requests_per_minute=60.0,
        tokens_per_minute=100_000.0,
        max_concurrent=8,
        max_running=4,
        max_context_tokens=4096,
        max_output_tokens=1024,
        kv_share=0.5,
        cache_share=0.25,
        budget=12.5,
        budget_alerts=(0.5, 1.0),
    )
    assert root.plan == Plan("default")
    assert (alice.role, root.role) == (TenantRole.USER, TenantRole.OPERATOR)
    assert (alice.is_disabled, root.is_disabled) == (False, True)
    assert (alice.auto, root.auto) == (None, ("small", "large"))
    assert tenants.prices_of("org/model-1.5") == Prices(0.5, 0.05, 2.0)
    assert tenants.prices_of("another") == NO_PRICES
    assert tenants.prices_of("another", "org/model-1.5") == Prices(0.5, 0.05, 2.0)


def test_a_key_is_found_by_its_digest_and_says_when_it_ends() -> None:
    tenants = read(WHOLE)
    for word, until in (("one", None), ("two", datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp())):
        found = tenants.of_digest(digest_of(word))
        assert found is not None
        assert (found[0].name, found[1].until) == ("alice", until)
    assert tenants.of_digest(digest_of("three")) is None


def test_secrets_differ_between_tenants_and_stay_when_others_come() -> None:
    before, after = read(WHOLE), read(WHOLE + "[tenants.new]\n")
    secrets = {name: tenant.secret for name, tenant in after.by_name.items()}
    assert len(set(secrets.values())) == 3
    assert before.by_name["alice"].secret == secrets["alice"]
    assert str(secrets["alice"]) not in repr(after.by_name["alice"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cache_secret must be 32 random bytes"),
        ('cache_secret = "short"', "cache_secret must be"),
        (SECRET, "0 tenants; allowed: 1 to 10000"),
        ("x = ", "is not valid TOML"),
        (
            SECRET + "[tenant.alice]",
            "at the top is 'tenant', which is unknown; did you mean tena",
        ),
        (SECRET + "tenants = 1", "tenants is not a table"),
        (SECRET + "tenants.alice = 1", "[tenants.alice] is not a table"),
        (SECRET + '[tenants."a b"]', "[tenants] has 'a b'; allowed as a name"),
        (
            SECRET + "[tenants.a]\nrol = 1",
            "in [tenants.a] is 'rol', which is unknown; did you ",
        ),
        (
            SECRET + "[tenants.a]\nzzz = 1",
            "known are auto, disabled, keys, overflow, plan, pools, role, zones",
        ),
        (SECRET + "[tenants.a]\nauto = []", "auto is '[]'; must be a list of 1 to 16 different"),
        (SECRET + "[tenants.a]\nauto = ['x', 'x']", "must be a list of 1 to 16 different models"),
        (SECRET + f"[tenants.a]\nauto = {[str(n) for n in range(17)]}", "a list of 1 to 16"),
        (SECRET + "[tenants.a]\nrole = 'admin'", "role is 'admin'; must be one of user, operator"),
        (SECRET + "[tenants.a]\nplan = 'gold'", "plan is 'gold', which is not one of default"),
        (SECRET + "[tenants.a]\ndisabled = 1", "disabled is '1'; must be true or false"),
        (SECRET + "[tenants.a]\nkeys = ['sk-secret']", "[tenants.a] keys must be a list"),
        (SECRET + f"[tenants.a]\nkeys = [{ONE}, {ONE}]", "different digests"),
        (
            SECRET + f"[tenants.a]\nkeys = [{{ digest = {ONE}, until = 2030-01-31T12:00:00 }}]",
            "[tenants.a] keys must be",
        ),
        (
            SECRET + f"[tenants.a]\nkeys = [{{ digest = {ONE}, until = '2030-01-31T12:00:00Z' }}]",
            "[tenants.a] keys must be",
        ),
        (
            SECRET + f"[tenants.a]\nkeys = [{ONE}]\n[tenants.b]\nkeys = [{ONE}]",
            "[tenants.b] has the same key as [tenants.a]",
        ),
        (SECRET + "[prices.m]\nprompt = -1", "[prices.m] prompt is '-1'; must be a number from 0"),
        (SECRET + "[prices.m]\ncached = 1", "did you mean cached_prompt?"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert words in str(refused.value)
    assert str(refused.value).startswith("tenants.toml")
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, "0") for name in ("weight", "kv_share", "cache_share", "max_concurrent")),
        *((name, "1.5") for name in ("kv_share", "cache_share", "max_running")),
        *((name, "true") for name in ("weight", "max_context_tokens", "budget")),
        *((name, "'5'") for name in ("tokens_per_minute", "max_output_tokens")),
        *((name, "nan") for name in ("weight", "budget")),
        *((name, "inf") for name in ("weight", "requests_per_minute")),
        ("budget", "-0.5"),
        ("requests_per_minute", "0.5"),
        ("classes", "[]"),
        ("classes", "['default', 'default']"),
        ("classes", "['urgent']"),
        ("classes", "'default'"),
        ("budget_alerts", "[0]"),
        ("budget_alerts", "0.5"),
        ("pools", "'a'"),
        ("pools", "['']"),
        ("pools", "['a b']"),
        ("overflow", "1"),
        ("zones", f"{['eu'] * 65}"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_name(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(f"{SECRET}[tenants.a]\n[plans.p]\n{field} = {value}")
    assert f"[plans.p] {field} is" in str(refused.value)
    assert "must be" in str(refused.value)


def test_deep_nesting_and_bad_utf8_are_refused() -> None:
    for content in (b"x = " + b"[" * 100_000, b"\xff"):
        with pytest.raises(ConfigError, match="is not valid TOML"):
            read_tenants(content, "f")


@pytest.mark.slow
def test_there_is_a_most_of_tenants() -> None:
    tables = "".join(f"[tenants.t{n}]\n" for n in range(MAX_TENANTS + 1))
    with pytest.raises(ConfigError, match="10001 tenants"):
        read(SECRET + tables)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[plans.p]\nweight = " + "9" * 5000, r"tenants\.toml"),
        ("[plans.p]\nweight = 0x" + "f" * 5000, r"tenants\.toml"),
        ("[prices.m]\nprompt = 2e9", "1,000,000,000"),  # too large to add up
    ],
    ids=["decimal", "hexadecimal", "price"],
)
def test_a_number_that_is_too_large_is_refused_like_any_other(table: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(f"{SECRET}[tenants.a]\n{table}")


def test_a_tenant_has_the_pools_and_zones_of_its_plan_unless_it_names_its_own() -> None:
    tenants = read(
        SECRET
        + """
        [plans.gold]
        pools = ["gold", "silver"]
        overflow = true
        [tenants.a]
        plan = "gold"
        [tenants.b]
        plan = "gold"
        pools = ["b"]
        zones = ["eu"]
        overflow = false
        [tenants.c]
        """
    ).by_name
    assert tenants["a"].placement == Placement(
        pools=frozenset({"gold", "silver"}), has_overflow=True
    )
    assert tenants["b"].placement == Placement(frozenset({"eu"}), frozenset({"b"}))
    assert tenants["c"].placement is ANYWHERE
