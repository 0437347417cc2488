"""The file that says which workers this server uses, and the task that notices when it changes.

The members that are known stay until a file says otherwise: whether they live, heartbeats tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from triolet.config.members import MAX_MEMBERS_BYTES, read_members
from triolet.errors import ConfigError
from triolet.watched_file import WatchedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config.members import Members
    from triolet.ids import Role

log = structlog.get_logger(__name__)


def by_model(file: Members, names: Sequence[str]) -> dict[str, list[tuple[Role, str]]]:
    """Return the role and address of each member by its model.

    Args:
      file: members that name no model are of the first.
      names: of the models of this server, where the file does not say them.

    Raises:
      ConfigError: a member is of another model.
    """
    if file.models is not None:
        names = [one.name for one in file.models]
    found: dict[str, list[tuple[Role, str]]] = {name: [] for name in names}
    for member in file.members:
        name = member.model or names[0]
        if name not in found:
            raise ConfigError(
                f"the member at {member.address} is of model {name!r}; this server has "
                f"{', '.join(names)}"
            )
        found[name].append((member.role, member.address))
    return found


class MemberFile:
    """One file.

    Args:
      path: of it; where there is none, the workers of the configuration are the members.
      poll_s: how often it is looked at. A change counts when it has stood for one more look.
    """

    def __init__(self, path: str, poll_s: float) -> None:
        self._poll_s = poll_s
        self._file = WatchedFile(path, "members", MAX_MEMBERS_BYTES, is_guarded=True)

    def read(self) -> Members | None:
        """Return what the file says now; None where there is none.

        Raises:
          ConfigError: it cannot be read, or is wrong.
        """
        if not self._file.path.exists():
            return None
        return read_members(self._file.read(), str(self._file.path))

    async def run(self, use: Callable[[Members], None]) -> None:
        """Apply each version of the file that this user or root has written and others may not.

        Args:
          use: gets the members; raises ConfigError where it cannot use them.
        """
        while True:
            if self._file.has_settled():
                self._file.note_tried()
                try:
                    use(read_members(self._file.read(), str(self._file.path)))
                except ConfigError as error:
                    log.error("members_refused", reason=str(error))
            await trio.sleep(self._poll_s)
