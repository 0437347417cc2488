"""`MemberSource`, the interface of a source of workers; the members file; and the choice of the
configured source.

Members stay in use until the source drops them. Only heartbeats decide whether they are alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from triolet.config.members import MAX_MEMBERS_BYTES, Member, read_members
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.watched_file import WatchedFile

from .member_table import MemberTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from triolet.config import ServerConfig
    from triolet.config.members import Members
    from triolet.store_health import StoreHealth

log = structlog.get_logger(__name__)


def by_model(file: Members, names: Sequence[str]) -> dict[str, list[tuple[Role, str]]]:
    """Return the role and address of each member, by model.

    Args:
      file: the members; those that name no model belong to the first one.
      names: this server's models, used if the file names none.

    Raises:
      ConfigError: a member names a model that this server does not have.
    """
    if file.models is not None:
        names = [one.name for one in file.models]
    found: dict[str, list[tuple[Role, str]]] = {name: [] for name in names}
    for member in file.members:
        name = member.model or names[0]
        if name not in found:
            raise ConfigError(
                f"the member at {member.address} has the model {name!r}, but this server has "
                f"{', '.join(names)}; correct its `model`"
            )
        found[name].append((member.role, member.address))
    return found


class MemberSource(Protocol):
    """A source of a server's list of workers."""

    @property
    def health(self) -> StoreHealth | None:
        """Whether the store answers; None for a file."""
        ...

    async def run(self, use: Callable[[Members], None]) -> None:
        """Pass the members to `use` at each change. If the source fails, the last members stay."""
        ...


class MemberFile:
    """A members file. See `MemberSource`.

    Args:
      path: the file's path; if it does not exist, the configured workers are used.
      poll_s: polling interval. A change is applied once the file has been stable for one interval.
    """

    def __init__(self, path: str, poll_s: float) -> None:
        self.health = None
        self._poll_s = poll_s
        self._file = WatchedFile(path, "members", MAX_MEMBERS_BYTES, is_guarded=True)

    def read(self) -> Members | None:
        """Return the file's members; None if the file does not exist.

        Raises:
          ConfigError: the file cannot be read or is invalid.
        """
        if not self._file.path.exists():
            return None
        return read_members(self._file.read(), str(self._file.path))

    async def run(self, use: Callable[[Members], None]) -> None:
        """Apply each new version of the file, provided that only this user or root can write it.

        Args:
          use: receives the members; raises ConfigError if it cannot use them.
        """
        while True:
            if self._file.has_settled():
                self._file.note_tried()
                try:
                    use(read_members(self._file.read(), str(self._file.path)))
                except ConfigError as error:
                    log.error("members_refused", reason=str(error))
            await trio.sleep(self._poll_s)


def member_source(config: ServerConfig, alive: Callable[[], Set[str]]) -> MemberSource | None:
    """Return the configured source; None if only configured addresses are used.

    Args:
      config: the server's settings.
      alive: returns the addresses of live workers.

    Raises:
      ConfigError: the file with Redis's URL cannot be read.
    """
    if config.members_file is not None:
        return MemberFile(config.members_file, config.members_poll_s)
    own, models = config.membership, config.of_models
    told = [
        Member(role, address, one.model_name if config.models else "")
        for one in models
        for role, addresses in (
            (Role.PREFILL, one.prefill_addresses),
            (Role.DECODE, one.decode_addresses),
        )
        for address in addresses
    ]
    # Imported late: few servers need these libraries.
    if own.dns.is_on:
        from .dns_source import DnsSource

        return DnsSource(own.dns, MemberTable(told, alive, own.dns.absent_answers))
    if own.redis.url:
        from .redis_source import RedisSource

        return RedisSource(own, MemberTable(told, alive), ["", *(one.model_name for one in models)])
    return None
