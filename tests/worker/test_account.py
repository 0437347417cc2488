"""Tests of a worker's account in an audit: its content in each phase of a request, and which peers
may request it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from engine.block_ledger import BlockLedger
from engine.prefix_cache import PrefixCache
from transport.frames import Audit, Audited, End, EndReason, Goodbye, Reserve
from transport.handshake import make_hello
from transport.lease import DECODE_TRANSITIONS
from triolet.audit import MAX_AUDIT_LEASES, LeaseAudit, ProcessFacts
from triolet.ids import AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams
from worker.account import verdict_of, worker_account
from worker.attempt_table import AttemptTable
from worker.counters import Counters
from worker.outbox import Outbox

from .pair import LINK, SERVER, Pair
from .phases import OTHER_SERVER, PHASES, inside_a_decode_step, paused, prefilling, running
from .scripts import scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.audit import WorkerAudit

NUM_BLOCKS = 24
STATES = {
    "queued": ("reserved", "reserved"),
    "prefilling": ("running", "reserved"),
    "filling": ("running", "filling"),
    "running": (None, "running"),
    "inside_a_decode_step": (None, "running"),
    "paused": (None, "paused"),
}


def accounts(pair: Pair) -> tuple[WorkerAudit, WorkerAudit]:
    return pair.prefill.account(pair.now), pair.decode.account(pair.now)


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_is_told_as_it_is(phase: Callable[[Pair], AttemptKey]) -> None:
    pair = Pair()
    key = phase(pair)
    pair.check()
    for account, state in zip(accounts(pair), STATES[phase.__name__], strict=True):
        told = [(lease.attempt, lease.server, lease.state) for lease in account.leases]
        wanted = [] if state is None else [(str(key), str(SERVER), state)]
        # Prefill has the attempt until decode has said that it needs nothing more.
        assert told == wanted or (state is None and told[0][2] == "shipping")
        assert account.num_leases == len(told)
        assert account.granted == 1
        pool = account.pool
        counted = pool.free_blocks + pool.leased_blocks + pool.cached_blocks
        assert counted == pool.total_blocks == NUM_BLOCKS
        assert pool.references == pool.leased_blocks == sum(x.num_blocks for x in account.leases)
        assert (pool.verdict, pool.spoiled_blocks, account.verdict) == ("", 0, "")


def test_ages_are_told_by_the_workers_own_clock() -> None:
    pair = Pair()
    pair.ask((1, 2, 3), remaining_s=60.0)
    pair.pass_time(1.0, beats=False)
    pair.beat()
    pair.pass_time(0.5, beats=False)
    [lease] = pair.decode.account(pair.now).leases
    assert lease.age_s == pytest.approx(1.5)
    assert lease.renewed_ago_s == pytest.approx(0.5)
    assert lease.remaining_s == pytest.approx(58.5)


def test_a_streams_tokens_and_window_are_told() -> None:
    pair = Pair()
    paused(pair)
    account = pair.decode.account(pair.now)
    assert [(lease.num_tokens, lease.allowed) for lease in account.leases] == [(2, 2)]
    assert (account.running, account.paused, account.rows) == (0, 1, 0)
    prefilling(other := Pair())
    assert other.prefill.account(other.now).leases[0].allowed is None


def test_what_ends_inside_a_step_is_told_until_it_returns() -> None:
    pair = Pair()
    key = inside_a_decode_step(pair)
    pair.end(key)
    account = pair.decode.account(pair.now)
    assert (account.num_leases, account.leaving, account.rows) == (0, 1, 1)
    assert account.leaving_blocks == account.pool.leased_blocks > 0
    pair.check()
    pair.nodes[Role.DECODE].finish_step(pair.now)
    account = pair.decode.account(pair.now)
    assert (account.leaving, account.leaving_blocks, account.late_rows) == (0, 0, 1)
    assert account.ended == {"cancel": 1}
    pair.settle()
    pair.run()
    pair.check_empty()


def test_kv_under_way_is_told_by_prefill() -> None:
    pair = Pair()
    pair.ask(tuple(range(1, 22)))
    windows = pair.prefill.account(pair.now).windows
    assert (windows.ring_bytes, windows.ring_size_bytes) == (0, LINK.kv_ring_bytes)
    node = pair.nodes[Role.PREFILL]
    pair.deliver()  # HELLO
    pair.deliver()  # WELCOME: the window is open
    for _ in range(3):
        node.begin_step(pair.now)
        node.finish_step(pair.now)
        pair.settle()
    windows = pair.prefill.account(pair.now).windows
    assert windows.kv_granted_bytes == LINK.kv_window_bytes
    assert 0 < windows.kv_under_way_bytes <= LINK.kv_window_bytes
    assert windows.kv_under_way_bytes <= windows.ring_bytes <= windows.ring_size_bytes
    pair.run()
    assert pair.prefill.account(pair.now).windows.kv_under_way_bytes == 0


def test_frames_that_are_not_acted_upon_are_told_by_reason() -> None:
    pair = Pair()
    key = running(pair)
    stranger, other = PeerId(Role.SERVER, "server-2", 3), OTHER_SERVER
    pair.decode.on_control(stranger.identity(), Audit(1), pair.now)
    pair.decode.on_control(other.identity(), make_hello(other), pair.now)
    pair.decode.on_control(other.identity(), End(*key, EndReason.CANCEL), pair.now)
    nonsense = Reserve(*pair.new_key(), b"", b"", SamplingParams(), 0, 1, 1.0)
    pair.decode.on_control(other.identity(), nonsense, pair.now)
    assert pair.decode.account(pair.now).dropped == {"stranger": 1, "foreign": 1, "rejected": 1}
    assert pair.decode.load().stale_frames == 3


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(
    "asker", [SERVER, PeerId(Role.SERVER, "server-9", 9), PeerId(Role.OPERATOR, "doctor", 9)]
)
def test_whoever_was_greeted_is_answered(role: Role, asker: PeerId) -> None:
    pair = Pair()
    core = pair.nodes[role].core
    core.on_control(asker.identity(), make_hello(asker), pair.now)
    core.outbox.take_for_servers()
    core.on_control(asker.identity(), Audit(41), pair.now)
    [send] = core.outbox.take_for_servers()
    assert send.to == asker.identity()
    assert isinstance(send.frame, Audited)
    assert send.frame.serial == 41
    assert send.frame.account.role is role


def test_a_stranger_learns_nothing() -> None:
    pair = Pair()
    stranger = PeerId(Role.SERVER, "server-9", 9)
    pair.decode.on_control(stranger.identity(), Audit(1), pair.now)
    [send] = pair.decode.outbox.take_for_servers()
    assert isinstance(send.frame, Goodbye)
    assert not send.frame.is_farewell, "its last life may have died"


def test_who_leaves_says_that_it_does_so_by_itself() -> None:
    pair = Pair()
    pair.decode.outbox.take_for_servers()
    pair.decode.say_goodbye()
    [send] = pair.decode.outbox.take_for_servers()
    assert isinstance(send.frame, Goodbye)
    assert send.frame.is_farewell


def test_looking_changes_nothing() -> None:
    pair = Pair()
    running(pair)
    pair.pass_time(0.75, beats=False)
    first = pair.decode.account(pair.now)
    assert pair.decode.account(pair.now) == first
    pair.pass_time(LINK.lease_ttl_s, beats=False)
    assert pair.decode.account(pair.now).ended == {"lease_expired": 1}, "no audit has renewed it"


def test_the_process_is_told_as_it_is_handed_in() -> None:
    pair = Pair()
    assert pair.decode.account(pair.now).process == ProcessFacts()


class Member:
    """The minimum that an attempt table needs."""

    def __init__(self, key: AttemptKey) -> None:
        self.key = key
        self.server = SERVER
        self.num_output_tokens = 0


def attempt_table_of(ledger: BlockLedger, count: int) -> AttemptTable[Member]:
    """Return an attempt table with some attempts of one block each, oldest first."""
    attempt_table: AttemptTable[Member] = AttemptTable(
        ledger, DECODE_TRANSITIONS, LINK, Outbox(), on_end=lambda member, now: None
    )
    for number in range(count):
        key = AttemptKey(number.to_bytes(16, "big"), 0)
        ledger.lease(key, 1)
        attempt_table.add(Member(key), now=float(number), remaining_s=1e6)
    return attempt_table


def account_of(ledger: BlockLedger, attempt_table: AttemptTable[Member]) -> WorkerAudit:
    identity = Pair().d_identity
    cache = PrefixCache(ledger, 4, scripted_engine())
    return worker_account(identity, LINK, cache, attempt_table, Counters(), 1e5, is_draining=True)


def test_a_list_too_long_is_cut_at_the_youngest_and_says_so() -> None:
    count = MAX_AUDIT_LEASES + 3
    ledger = BlockLedger(count + 1)
    account = account_of(ledger, attempt_table_of(ledger, count))
    assert account.is_cut
    assert account.is_draining
    assert (len(account.leases), account.num_leases) == (MAX_AUDIT_LEASES, count)
    assert account.leases[0].age_s > account.leases[-1].age_s
    assert account.pool.references == count


def test_a_worker_that_is_inconsistent_says_so_instead_of_dying() -> None:
    ledger = BlockLedger(9)
    attempt_table = attempt_table_of(ledger, 2)
    ledger.lease("nobody", 1)
    account = account_of(ledger, attempt_table)
    assert account.verdict == "blocks are leased to an unknown attempt"
    ledger._free.append(ledger._free[0])
    assert account_of(ledger, attempt_table).pool.verdict == "a block is listed as free twice"


def test_a_verdict_is_never_empty_if_something_is_wrong() -> None:
    def fail() -> None:
        raise AssertionError

    assert verdict_of(fail) == "an assertion failed"
    assert verdict_of(lambda: None) == ""


def test_an_account_fits_into_a_control_frame() -> None:
    longest = "x" * 128
    lease = LeaseAudit(longest, longest, longest, 2**40, 1e9, 1e9, 1e9, 2**40, 2**40)
    assert len(msgspec.msgpack.encode(lease)) * MAX_AUDIT_LEASES < (LINK.max_control_frame_bytes)
