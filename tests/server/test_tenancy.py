"""Tests of API keys and tenants: which keys are accepted, and changes to tenants while the server
runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from server.tenants.tenancy import Tenancy
from tests.server.support.tenants import tenancy_of, tenant, tenants_of
from triolet.errors import RequestError
from triolet.service_class import Placement
from triolet.tenants.plans import ANONYMOUS, Plan, TenantKey

if TYPE_CHECKING:
    from collections.abc import Callable


def refusal(ask: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(RequestError) as refused:
        ask()
    return refused.value.status, refused.value.code


def test_without_tenants_everybody_is_the_one_anonymous_tenant() -> None:
    tenancy = Tenancy()
    assert tenancy.is_open
    assert tenancy.tenant_of(None, 0.0) is tenancy.tenant_named("") is ANONYMOUS


def test_a_key_is_let_in_until_it_ends() -> None:
    alice = tenant("alice", "one", "two")
    lasting, ending = alice.keys
    tenancy = Tenancy(tenants_of(replace(alice, keys=(lasting, TenantKey(ending.digest, 100.0)))))
    assert tenancy.tenant_of("two", 99.9).name == "alice"
    assert refusal(lambda: tenancy.tenant_of("two", 100.0)) == (401, "invalid_api_key")
    assert tenancy.tenant_of("one", 100.0).name == "alice"
    for key in (None, "", "three", "x" * 300):
        assert refusal(lambda key=key: tenancy.tenant_of(key, 0.0)) == (401, "invalid_api_key")


def test_a_wrong_key_is_told_that_it_is_wrong() -> None:
    tenancy = tenancy_of(alice="one")
    for key, words in (
        (None, "asks for an API key"),
        ("", "asks for"),
        ("two", "is wrong, or has"),
    ):
        with pytest.raises(RequestError, match=words):
            tenancy.tenant_of(key, 0.0)
    with pytest.raises(RequestError, match="tenant carol no longer exists"):
        tenancy.tenant_named("carol")


def test_a_disabled_tenant_is_told_so_by_its_own_key_only() -> None:
    tenancy = Tenancy(tenants_of(tenant("alice", "one", is_disabled=True), tenant("bob", "two")))
    assert refusal(lambda: tenancy.tenant_of("one", 0.0)) == (403, "permission_denied")
    assert refusal(lambda: tenancy.tenant_named("alice")) == (403, "permission_denied")
    assert refusal(lambda: tenancy.tenant_named("carol")) == (401, "invalid_api_key")


def test_a_tenant_bound_to_zones_is_told_where_to_go() -> None:
    alice = replace(tenant("alice", "one"), placement=Placement(frozenset({"eu-1", "eu-2"})))
    for zone, where in (("us-1", "us-1"), ("", "no zone")):
        tenancy = Tenancy(tenants_of(alice, tenant("bob", "two")), zone)
        assert tenancy.tenant_of("two", 0.0).name == "bob"
        for ask in (partial(tenancy.tenant_of, "one", 0.0), partial(tenancy.tenant_named, "alice")):
            with pytest.raises(RequestError, match=f"eu-1 or eu-2, and .* in {where}") as error:
                ask()
            assert (error.value.status, error.value.code) == (421, "wrong_zone")
    assert Tenancy(tenants_of(alice), "eu-2").tenant_of("one", 0.0) is alice


@pytest.mark.parametrize(
    ("before", "after", "is_dismissed"),
    [
        ("", "eu", True),
        ("eu us", "eu", True),
        ("eu", "us", True),
        ("eu", "eu us", False),
        ("eu", "", False),
        ("", "", False),
    ],
)
def test_requests_that_may_have_left_the_new_zones_end(
    before: str, after: str, *, is_dismissed: bool
) -> None:
    alice = tenant("alice", "one")
    old, new = (
        replace(alice, placement=Placement(frozenset(zones.split()))) for zones in (before, after)
    )
    assert Tenancy(tenants_of(old)).replace(tenants_of(new)) == (
        {"alice"} if is_dismissed else set()
    )


def test_a_change_counts_at_once_and_names_who_may_ask_no_more() -> None:
    tenancy = tenancy_of(alice="1", bob="2", carol="3")
    gone = tenancy.replace(
        tenants_of(
            tenant("alice", "4", plan=Plan("gold", weight=2.0)),
            tenant("bob", "2", is_disabled=True),
            tenant("dave", "5"),
        )
    )
    assert gone == {"bob", "carol"}
    assert tenancy.tenant_of("4", 0.0).plan.weight == 2.0
    assert refusal(lambda: tenancy.tenant_of("1", 0.0)) == (401, "invalid_api_key")
    assert tenancy.replace(tenants_of(tenant("alice"))) == {"dave"}


def test_a_refused_file_changes_nothing_and_is_told_of_until_a_good_one_comes() -> None:
    tenancy = tenancy_of(alice="1")
    tenancy.refuse("it is not valid TOML")
    assert tenancy.tenant_of("1", 0.0).name == "alice"
    report = tenancy.report
    assert (report.tenants, report.num_taken, report.num_refused) == (1, 1, 1)
    assert report.problem == "it is not valid TOML"
    tenancy.replace(tenants_of(tenant("alice"), tenant("bob")))
    report = tenancy.report
    assert (report.tenants, report.num_taken, report.problem) == (2, 2, "")
