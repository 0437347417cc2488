"""GET /fleet/audit: every block, lease and request of the fleet, and what is wrong with them.

For operators. It names requests and asks every worker, so where there are no tenants peers from
elsewhere are refused; so is what a proxy on this machine passes on for somebody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace
from quart import request

from triolet.audit import FleetAudit
from triolet.invariants import check_invariants
from triolet.loopback import is_loopback

from .errors import http_error
from .generate import json_response
from .live import UNIX_PEER, own_peer

if TYPE_CHECKING:
    from collections.abc import Set

    from quart import Response

    from .ports import Services

FORWARDED: Final = frozenset({"forwarded", "x-forwarded-for", "x-real-ip", "via"})
"""What proxies add to a request that is not their own."""
OWN_AUDIT: Final = "/fleet/audit/own"
"""Where servers on one port ask one another."""


def is_from_here(peer: str | None, header_names: Set[str], *, is_forwarding: bool = False) -> bool:
    """Return whether a request comes from this machine and is not passed on for another client.

    Args:
      peer: address of the other end of the connection, which no header changes.
      header_names: in lower case.
      is_forwarding: the peer has named another client for the whole connection.
    """
    is_local = peer is not None and (peer == UNIX_PEER or is_loopback(peer))
    return is_local and not is_forwarding and not header_names & FORWARDED


async def own_audit(services: Services) -> Response:
    """Answer with what this server knows."""
    return _document(await _audit(services))


async def fleet_audit(services: Services) -> Response:
    """Answer with the violations, the server's accounts and each worker's; where several servers
    share the port, with what each of them knows."""
    audit = await _audit(services)
    if services.siblings is not None:
        others = (await services.siblings.ask(OWN_AUDIT)).values()
        siblings = tuple(FleetAudit.from_json(body) for body in others if body is not None)
        audit = replace(audit, siblings=siblings)
    return _document(audit)


def check_is_from_here(services: Services) -> None:
    """Refuse the running request with 403 unless it comes from this machine; where there are
    tenants, an operator's key has been asked for instead."""
    if not services.tenancy.is_open:
        return
    header_names = {name.lower() for name in request.headers.keys()}  # noqa: SIM118 (multi-dict)
    peer = own_peer(request.scope)
    if not is_from_here(peer.host, header_names, is_forwarding=peer.is_forwarding):
        raise http_error(403, "this is for the machine that the server runs on; ask from there")


async def _audit(services: Services) -> FleetAudit:
    check_is_from_here(services)
    return await services.fleet.audit(services.count_connections())


def _document(audit: FleetAudit) -> Response:
    document = {"violations": check_invariants(audit), **msgspec.structs.asdict(audit)}
    return json_response(document)
