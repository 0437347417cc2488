"""Tests of check_invariants: each violation of an audit is found, and a healthy fleet has none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from triolet.audit import Doubt, FleetAudit, PoolAudit, ProcessFacts, WindowsAudit
from triolet.ids import Role
from triolet.invariants import Violation, check_at_rest, check_invariants

from .audits import (
    ATTEMPT,
    FACTS,
    OTHER_ATTEMPT,
    SERVER,
    a_fleet,
    a_lease,
    a_server,
    a_view,
    a_worker,
    an_attempt,
    an_idle_fleet,
    an_idle_server,
    an_idle_worker,
)

POOL = a_worker().pool


def pool(**changes: object) -> PoolAudit:
    return replace(POOL, **changes)


def with_lease(**changes: object) -> FleetAudit:
    return a_fleet(a_worker(leases=(a_lease(**changes),)))


WRONG: dict[str, tuple[FleetAudit, str, str, str]] = {
    # name: (audit, invariant, process, part of the message)
    "a block is lost": (a_fleet(a_worker(pool=pool(free_blocks=89))), "I1", "decode-0", "make 99"),
    "a block is counted twice": (
        a_fleet(a_worker(pool=pool(cached_blocks=7))),
        "I1",
        "decode-0",
        "make 101, not 100",
    ),
    "the ledger contradicts itself": (
        a_fleet(a_worker(pool=pool(verdict="a block is free twice"))),
        "I1",
        "decode-0",
        "free twice",
    ),
    "blocks are leased without an owner": (
        a_fleet(a_worker(pool=pool(references=3), leases=(a_lease(num_blocks=3),))),
        "I1",
        "decode-0",
        "name 3",
    ),
    "blocks of an attempt that is gone": (
        a_fleet(a_worker(leases=(a_lease(num_blocks=1),))),
        "I1",
        "decode-0",
        "attempts hold 1 blocks and the ledger counts 4",
    ),
    "attempts hold more than the ledger knows": (
        a_fleet(a_worker(leaving=1, granted=11, leaving_blocks=2)),
        "I1",
        "decode-0",
        "attempts hold 6",
    ),
    "an attempt that the server counts and no request has": (
        a_fleet(after=(an_attempt(is_wanted=False),)),
        "I2",
        "decode-0",
        "it belongs to no request",
    ),
    "a lease that did not expire": (
        with_lease(renewed_ago_s=4.1),
        "I2",
        "decode-0",
        "last named by",
    ),
    "a lease past its deadline": (with_lease(remaining_s=-2.1), "I2", "decode-0", "2.1 s past"),
    "a lease of this server that it does not know": (
        a_fleet(unknown=(Doubt(OTHER_ATTEMPT, 4.1),)),
        "I2",
        "decode-0",
        "not known it for 4.1 s",
    ),
    "a lease that ended twice": (
        a_fleet(a_worker(ended={"stop": 6, "cancel": 4})),
        "I3",
        "decode-0",
        "10 leases granted, 10 ended, 1 alive",
    ),
    "a lease that vanished": (
        a_fleet(a_worker(granted=11)),
        "I3",
        "decode-0",
        "11 leases granted, 9 ended, 1 alive",
    ),
    "leases and attempts disagree": (
        a_fleet(a_worker(verdict="an attempt without a lease")),
        "I3",
        "decode-0",
        "without a lease",
    ),
    "rows for ended attempts": (a_fleet(a_worker(late_rows=10)), "I6", "decode-0", "10 rows"),
    "a stream beyond its window": (with_lease(num_tokens=65), "I7", "decode-0", "allowed 64"),
    "a window that drifts": (
        a_fleet(a_worker(windows=WindowsAudit(verdict="the window's count drifted"))),
        "I7",
        "decode-0",
        "drifted",
    ),
    "a step that is too large": (a_fleet(a_worker(rows=9)), "I7", "decode-0", "8 fit"),
    "too many tombstones": (a_fleet(a_worker(tombstones=101)), "I7", "decode-0", "101 ended"),
    "a freed block that was written": (
        a_fleet(a_worker(pool=pool(spoiled_blocks=1))),
        "I8",
        "decode-0",
        "1 free blocks were written",
    ),
    "a request without an answer": (
        a_fleet(server=a_server(received=14)),
        "I9",
        "server",
        "14 requests received, 11 accepted, 2 rejected",
    ),
    "a request that ended twice": (
        a_fleet(server=a_server(ended={"stop": 7, "client_gone": 3})),
        "I9",
        "server",
        "11 requests accepted, 10 ended, 2 in flight",
    ),
    "a request that was lost": (
        a_fleet(server=a_server(ended={"stop": 5, "client_gone": 3})),
        "I9",
        "server",
        "8 ended",
    ),
    "a request that neither waits nor runs": (
        a_fleet(server=a_server(waiting=0)),
        "I9",
        "server",
        "0 wait, 1 have",
    ),
    "a request that outlived its deadline": (
        a_fleet(server=a_server(overdue_s=2.1)),
        "I10",
        "server",
        "2.1 s past its deadline",
    ),
    "an attempt that its worker does not have": (
        a_fleet(missing=(Doubt(ATTEMPT, 4.1),)),
        "I10",
        "decode-0",
        "has had no lease there for 4.1 s",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_found_named_and_explained(name: str) -> None:
    audit, invariant, where, words = WRONG[name]
    [violation] = check_invariants(audit)
    assert (violation.invariant, violation.where) == (invariant, where)
    assert words in violation.what
    assert violation.meaning
    assert violation.remedy
    assert str(violation).startswith(f"{invariant} {where}: ")


RIGHT: dict[str, FleetAudit] = {
    "a fleet at work": a_fleet(),
    "a fleet at rest": an_idle_fleet(),
    "a worker that does not answer": FleetAudit(
        2.0, a_server(), (a_view(None, silence="no answer within 1 s", after=(an_attempt(),)),)
    ),
    "granted after the server was asked": a_fleet(before=()),
    "ended before the answer came": a_fleet(after=()),
    "a lease that is not known yet, or no longer": a_fleet(
        unknown=(Doubt(ATTEMPT, 3.9),), missing=(Doubt(ATTEMPT, 3.9),)
    ),
    "a lease whose server fell silent a moment ago": with_lease(renewed_ago_s=2.1),
    "a lease of another server": with_lease(server="other@00000000000000bb"),
    "a lease at its deadline": with_lease(remaining_s=-0.1),
    "a request at its deadline": a_fleet(server=a_server(overdue_s=0.1)),
    "an attempt that ended during the step": a_fleet(
        a_worker(
            leases=(a_lease(num_blocks=3),),
            leaving=1,
            leaving_blocks=1,
            granted=11,
        )
    ),
    "a list that was cut": a_fleet(
        a_worker(num_leases=2, granted=11, pool=pool(leased_blocks=6, references=6, free_blocks=88))
    ),
    "shared blocks": a_fleet(
        a_worker(
            leases=(a_lease(), a_lease(attempt=OTHER_ATTEMPT)),
            num_leases=2,
            granted=11,
            pool=pool(references=8),
        )
    ),
    "a first token before there is credit": with_lease(num_tokens=1, allowed=0),
    "prefill, whose steps are bounded by tokens": a_fleet(a_worker(role=Role.PREFILL, rows=9)),
    "poison that holds": a_fleet(a_worker(pool=pool(spoiled_blocks=0))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_live_fleet_shows_no_false_violation(name: str) -> None:
    assert check_invariants(RIGHT[name]) == []


def test_a_cut_list_still_shows_blocks_beyond_the_ledgers_count() -> None:
    worker = a_worker(num_leases=2, granted=11, leases=(a_lease(num_blocks=5),))
    assert [v.invariant for v in check_invariants(a_fleet(worker))] == ["I1"]


def test_every_violation_of_every_worker_is_listed() -> None:
    broken = a_worker(pool=pool(free_blocks=89), leases=(a_lease(renewed_ago_s=9.0),))
    views = (a_view(broken), a_view(replace(broken, name="decode-1"), name="decode-1"))
    found = check_invariants(FleetAudit(2.0, a_server(), views))
    assert [(v.invariant, v.where) for v in found] == [
        ("I1", "decode-0"),
        ("I2", "decode-0"),
        ("I1", "decode-1"),
        ("I2", "decode-1"),
    ]


HELD: dict[str, tuple[FleetAudit, str]] = {
    "a request": (
        an_idle_fleet(server=an_idle_server(accepted=12, received=14, in_flight=1, waiting=1)),
        "1 requests in flight",
    ),
    "a lease": (
        an_idle_fleet(
            an_idle_worker(leases=(a_lease(num_blocks=0),), num_leases=1, granted=11), after=()
        ),
        "1 leases",
    ),
    "an attempt that is leaving": (
        an_idle_fleet(an_idle_worker(leaving=1, granted=11)),
        "1 attempts on their way out",
    ),
    "a row": (an_idle_fleet(an_idle_worker(rows=1)), "1 rows"),
    "KV under way": (
        an_idle_fleet(an_idle_worker(windows=WindowsAudit(kv_under_way_bytes=5))),
        "5 bytes of KV",
    ),
    "KV in the ring": (
        an_idle_fleet(an_idle_worker(windows=WindowsAudit(ring_bytes=5))),
        "5 bytes in the ring",
    ),
    "the server's count": (an_idle_fleet(after=(an_attempt(),)), "1 attempts that the server"),
    "credit that was spent": (an_idle_fleet(available_blocks=99), "counts 99"),
    "credit that was never given": (an_idle_fleet(available_blocks=101), "counts 101"),
}


@pytest.mark.parametrize("name", HELD)
def test_at_rest_nothing_is_held(name: str) -> None:
    audit, words = HELD[name]
    assert check_invariants(audit) == []
    [violation] = check_at_rest(audit)
    assert violation.invariant == "I7"
    assert words in violation.what


def test_leased_blocks_at_rest_are_found_even_if_their_lease_is_listed() -> None:
    found = check_at_rest(a_fleet(server=an_idle_server()))
    assert [v.invariant for v in found] == ["I7"] * 4
    assert "4 leased blocks, at rest" in [v.what for v in found]


def test_at_rest_every_worker_answers() -> None:
    silent = FleetAudit(2.0, an_idle_server(), (a_view(None, silence="it is dead"),))
    [violation] = check_at_rest(silent)
    assert "it is dead" in violation.what


def grown(**changes: int | None) -> list[Violation]:
    """Return the violations if the worker's process has changed since the last rest."""
    now = an_idle_fleet(an_idle_worker(process=replace(FACTS, **changes)))
    return check_at_rest(now, before=an_idle_fleet())


@pytest.mark.parametrize("what", ["open_fds", "threads", "tasks"])
def test_what_a_process_keeps_after_requests_is_a_leak(what: str) -> None:
    [violation] = grown(**{what: 21})
    assert violation.invariant == "I7"
    assert violation.what.startswith("21 ")
    assert grown(**{what: 3}) == []
    assert grown(**{what: None}) == []


def test_the_server_keeps_nothing_either() -> None:
    server = an_idle_server(process=replace(FACTS, tasks=10))
    [violation] = check_at_rest(an_idle_fleet(server=server), before=an_idle_fleet())
    assert (violation.where, violation.what) == ("server", "10 tasks; there were 9 at rest before")


def test_another_life_is_not_compared() -> None:
    worker = an_idle_worker(epoch="00000000000000ee", process=replace(FACTS, open_fds=99))
    assert check_at_rest(an_idle_fleet(worker), before=an_idle_fleet()) == []


def test_memory_may_grow_and_facts_may_be_unknown() -> None:
    assert grown(rss_bytes=2**30) == []
    unknown = an_idle_fleet(an_idle_worker(process=ProcessFacts()))
    assert check_at_rest(an_idle_fleet(), before=unknown) == []


def test_the_server_is_named_as_leases_name_it() -> None:
    assert a_lease().server == SERVER
