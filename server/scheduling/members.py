"""The file that says which workers this server uses, and the task that notices when it changes.

The members that are known stay until a file says otherwise: whether they live, heartbeats tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from triolet.errors import ConfigError
from triolet.members import MAX_MEMBERS_BYTES, read_members
from triolet.watched_file import WatchedFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.members import Member

log = structlog.get_logger(__name__)


class MemberFile:
    """One file.

    Args:
      path: of it; where there is none, the workers of the configuration are the members.
      poll_s: how often it is looked at. A change counts when it has stood for one more look.
    """

    def __init__(self, path: str, poll_s: float) -> None:
        self._file = WatchedFile(path, "members", MAX_MEMBERS_BYTES)
        self._poll_s = poll_s

    async def run(self, use: Callable[[tuple[Member, ...]], None]) -> None:
        """Apply each version of the file.

        Args:
          use: gets the members.
        """
        while True:
            if self._file.has_settled():
                self._file.note_tried()
                try:
                    members = read_members(self._file.read(), str(self._file.path))
                except ConfigError as error:
                    log.error("members_refused", reason=str(error))
                else:
                    use(members)
            await trio.sleep(self._poll_s)
