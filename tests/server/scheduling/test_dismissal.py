"""Tests that a disabled or removed tenant's requests end and other tenants' requests continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.contract.generation import Failed, Finished, input_request
from triolet.pooling import VectorForm
from triolet.service_class import Scheduling

from .fakes import make_request
from .stages import UNFINISHED, brought_to
from .world import World

if TYPE_CHECKING:
    from server.scheduling.request import Phase


@pytest.mark.parametrize("phase", UNFINISHED)
def test_a_dismissed_tenants_sequences_end_in_every_phase(phase: Phase) -> None:
    world = World()
    reader = brought_to(world, phase)
    world.requests.cancel_tenants({reader.request.spec.scheduling.tenant}, world.now)
    world.read(reader)
    error = reader.failed.error
    assert (error.status, error.code) == (403, "permission_denied")
    world.settle()
    assert world.requests.num_in_flight == 0


def test_others_go_on() -> None:
    world = World()
    readers = {
        name: world.submit(make_request(n, max_tokens=8, scheduling=Scheduling(name)))
        for n, name in enumerate(("alice", "bob"), 1)
    }
    world.requests.cancel_tenants({"alice", "nobody"}, world.now)
    world.settle()
    for reader in readers.values():
        world.read(reader)
    assert readers["alice"].failed.error.status == 403
    assert len(readers["bob"].token_ids) == 8


def test_inputs_of_a_dismissed_tenant_end_too() -> None:
    world = World()
    inputs = [
        input_request(
            n.to_bytes(16, "big"), (1, 2, 3), VectorForm(), 600.0, scheduling=Scheduling(name)
        )
        for n, name in enumerate(("alice", "bob"), 1)
    ]
    running = world.requests.submit(inputs, world.now)
    world.collect()
    world.requests.cancel_tenants({"alice"}, world.now)
    world.settle()
    alice, bob = running
    assert isinstance(alice.terminal, Failed)
    assert alice.terminal.error.status == 403
    assert isinstance(bob.terminal, Finished)
    assert bob.vector
    world.check_idle()
