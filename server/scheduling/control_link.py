"""The server's links to control, which loads and unloads models or moves their routes: reports each
model's activity, and receives states and routes."""

from __future__ import annotations

import time
from contextlib import closing
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from transport.control_protocol import (
    MAX_FRAME_BYTES,
    Activity,
    ModelActivity,
    Models,
    Wake,
    decode_told,
    encoded,
)
from transport.frames import ControlNews, Goodbye, ServerReport, Welcome
from transport.handshake import check_welcome, make_hello
from transport.link import PeerBusy, PeerGone
from triolet.config.routes import require_routes
from triolet.errors import ConfigError
from triolet.ids import PeerId, Role, new_epoch
from triolet.units import SECONDS

from .presence import ASLEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transport.control_protocol import Observed, Said
    from transport.link import Connection, LinkMessage, Network
    from transport.rollout_protocol import CandidateReport, RolloutView
    from triolet.config import ServerConfig
    from triolet.config.routes import Route

    from .links import Links
    from .presence import Presence

log = structlog.get_logger(__name__)

REPORT_S: Final = 1.0 * SECONDS
"""Interval between reports when nothing changes."""
MOST_AHEAD_S: Final = 60 * SECONDS
"""How far control's clock may be ahead of this server's."""
REDIAL_S: Final = 0.5 * SECONDS
"""Delay before redialling. Control restarts within a second."""


class _Model:
    """One model's reports to control.

    Args:
      fleet: the model's workers and requests.

    Attributes:
      fleet: the model's workers and requests.
      presence: receives the state that control sends.
      lost_zones: see FleetStatus.
    """

    def __init__(self, fleet: Links) -> None:
        self.fleet = fleet
        self.presence: Presence = fleet.admission.presence
        self.lost_zones = frozenset[str]()
        self._received = 0
        self._used_at: float | None = None

    def report(self, name: str, now: float) -> tuple[ModelActivity, bool]:
        """Return the model's activity, and whether control should wake it."""
        status = self.fleet.status()
        in_flight = status.queued + status.running
        if in_flight or status.received != self._received:
            self._received, self._used_at = status.received, now
        used_s_ago = None if self._used_at is None else now - self._used_at
        is_missed = self.presence.is_wanted or (status.queued > 0 and not status.is_ready)
        self.presence.note_report(is_idle=not in_flight)
        self.lost_zones = status.lost_zones
        held, version = self.fleet.adapters.held, self.fleet.version
        activity = ModelActivity(
            name,
            in_flight,
            status.queued,
            used_s_ago,
            status.is_ready,
            held,
            version,
            status.work,
        )
        return activity, is_missed and self.presence.state in ASLEEP


class RolloutReports:
    """What a server tells control about rollouts. This base class tells nothing."""

    def hear(self, views: tuple[RolloutView, ...]) -> None:
        """Take the rollouts of control's news."""

    def take(self, server: str) -> Sequence[Observed]:
        """Return what was seen since the last call."""
        del server
        return ()

    def freezes(self) -> Sequence[str]:
        """Return why no rollout should go on."""
        return ()

    def candidates(self) -> dict[str, CandidateReport]:
        """Return what is known about the candidates, by version."""
        return {}


class ControlLink:
    """Keep one server's links to control, and to those that stand by.

    Args:
      config: addresses and bounds.
      network: makes the links.
      name: this server's name in the fleet.
      fleets: each model's fleet by name; call `refresh` after a change.
      refused: why models could not be added here, by name.
      routes: returns this server's routes.
      use_routes: called with the routes that control orders.
      rollouts: hears of rollouts, and tells what control should know about them.

    Raises:
      ConfigError: an address cannot be used, or needs keys.
    """

    def __init__(
        self,
        config: ServerConfig,
        network: Network,
        name: str,
        fleets: Mapping[str, Links],
        refused: Mapping[str, str] = MappingProxyType({}),
        routes: Callable[[], Mapping[str, Route]] = dict,
        use_routes: Callable[[Mapping[str, Route]], object] = dict,
        rollouts: RolloutReports | None = None,
    ) -> None:
        self._config = config
        self._network = network
        self._me = PeerId(Role.SERVER, name, new_epoch())
        self._fleets = fleets
        self._refused = refused
        self._routes = routes
        self._use_routes = use_routes
        self._rollouts = rollouts or RolloutReports()
        self._in_charge = ""  # address of the control that was heard last
        self._models: dict[str, _Model] = {}
        self._told = Models(())
        self._troubles: dict[str, str] = {}
        self._due = trio.Event()
        for address in config.control_addresses:
            self._dial(address).close()
        self.refresh()

    def refresh(self) -> None:
        """Record models that were added, removed or refused, and report them to control."""
        self._models = {
            name: self._models.get(name) or self._known(name, fleet)
            for name, fleet in self._fleets.items()
        }
        self._report_now()

    def _known(self, name: str, fleet: Links) -> _Model:
        model = _Model(fleet)
        model.presence.changed = self._report_now
        for news in self._told.models:
            if news.name == name:
                model.presence.note(news, trio.current_time())
        return model

    def _report_now(self) -> None:
        self._due.set()
        self._due = trio.Event()

    async def run(self) -> None:
        """Keep the links until cancelled. While control is away, models keep their last state and
        routes."""
        async with trio.open_nursery() as nursery:
            for address in self._config.control_addresses:
                nursery.start_soon(self._keep, address)

    def _dial(self, address: str) -> Connection:
        link = self._config.link
        return self._network.connect(
            address, self._me.identity(), hwm=link.control_hwm, max_frame_bytes=MAX_FRAME_BYTES
        )

    async def _keep(self, address: str) -> None:
        """Keep one link, and log each new trouble once."""
        while True:
            try:
                with closing(self._dial(address)) as connection:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._report, connection, address)
                        trouble = await self._hear(connection, address)
                        nursery.cancel_scope.cancel()
            except* (ConfigError, PeerBusy, PeerGone, msgspec.MsgspecError) as group:
                trouble = str(group.exceptions[0])
            if trouble != self._troubles.get(address):
                log.info("control_lost", address=address, reason=trouble)
            self._troubles[address] = trouble
            for model in self._models.values():
                model.presence.note_lost(trio.current_time())
            await trio.sleep(REDIAL_S)

    async def _hear(self, connection: Connection, address: str) -> str:
        """Use control's news until the link ends; return why it ended."""
        while True:
            messages: Sequence[LinkMessage] = ()
            with trio.move_on_after(self._config.link.lease_ttl_s):
                messages = await connection.receive_many()
            if not messages:
                return connection.trouble or "it does not answer"
            for _, frame, _ in messages:
                if isinstance(frame, Welcome):
                    frame = check_welcome(frame, me=self._me, expected=Role.CONTROL) or frame
                if isinstance(frame, Goodbye):
                    return frame.reason
                if isinstance(frame, Welcome):
                    self._troubles.pop(address, None)
                    log.info("control_found", address=address)
                if isinstance(frame, ControlNews):
                    told = decode_told(frame.body)
                    self._use(told)
                    if self._told is told:
                        self._in_charge = address

    def _use(self, told: Models) -> None:
        """Use control's news, unless a later control was heard.

        Raises:
          ConfigError: its routes cannot be used.
        """
        if told.fence < self._told.fence:
            return
        if told.fence > 1000 * (time.time() + MOST_AHEAD_S):
            raise ConfigError(
                "control's clock is ahead of this server's, so that no later control could take "
                "over; set its clock and restart it"
            )
        require_routes(told.routes, "control")
        self._use_routes(told.routes)
        self._rollouts.hear(told.rollouts)
        before, self._told = self._told, told
        for news in told.models:
            if news.name in self._models:
                self._models[news.name].presence.note(news, trio.current_time())
        # A model may have gone to sleep just as a request arrived. Rollouts change with each report
        # of evidence: answering them at once would go round and round.
        if (told.models, told.routes) != (before.models, before.routes):
            self._report_now()

    async def _report(self, connection: Connection, address: str) -> None:
        await connection.send(make_hello(self._me, self._config.control_fleet))
        while True:
            due, now = self._due, trio.current_time()
            reports = [model.report(name, now) for name, model in self._models.items()]
            shown = tuple(activity for activity, _ in reports)
            routes, fence = dict(self._routes()), self._told.fence
            zones = frozenset[str]().union(*(one.lost_zones for one in self._models.values()))
            freezes = (*self._rollouts.freezes(), *(f"zone {one} is lost" for one in sorted(zones)))
            activity = Activity(
                self._me.name,
                shown,
                dict(self._refused),
                routes,
                fence,
                self._config.zone,
                freezes,
                self._rollouts.candidates(),
            )
            said: list[Said] = [activity]
            said += (Wake(one.name) for one, is_missed in reports if is_missed)
            for one in said:
                connection.send_nowait(ServerReport(encoded(one)))
            # Only now: what is taken is lost if the link is broken.
            if address == self._in_charge:
                for seen in self._rollouts.take(self._me.name):
                    connection.send_nowait(ServerReport(encoded(seen)))
            with trio.move_on_after(REPORT_S):
                await due.wait()
