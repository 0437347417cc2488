"""`MemberTable`: decides which workers a server keeps when DNS or Redis names others, fewer or
none.

Such a store may be down, late, empty or wrong, so a worker's absence from an answer proves little:

- an answer that contains no live worker (one that heartbeats reach) drops no worker;
- with DNS a worker is dropped after several answers in a row without it; with Redis once it is dead
  and an answer lacks it;
- answers may be partial (round robin, a limit on addresses). An answer with a new worker drops no
  other. Once an answer brings a missing live worker back, answers count as partial, and many more
  of them must lack a live worker before it is dropped.

A dropped worker gets no new requests and finishes its streams (`Links.set_members`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config.members import MAX_MEMBERS, Member, Members

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Set

    from triolet.ids import Role

PARTIAL_ROUNDS: Final = 20
"""With partial answers, a live worker is dropped after as many answers without it as could have
named all workers this many times. Random answers leave out a worker that often in one of e^20
cases."""


class MemberTable:
    """The members according to one store.

    Args:
      members: configured workers; they count like those of an earlier answer.
      alive: returns the addresses of live workers.
      absent_answers: answers in a row without a worker before it is dropped. None if workers
        register themselves: then only a dead worker is dropped, at once; operators remove a live
        one by draining it.
    """

    def __init__(
        self,
        members: Iterable[Member],
        alive: Callable[[], Set[str]],
        absent_answers: int | None = None,
    ) -> None:
        self._absent = dict.fromkeys(members, 0)
        self._alive = alive
        self._absent_answers = absent_answers or 1
        self._keeps_alive = absent_answers is None
        self._is_partial = False

    def take(
        self, found: Collection[Member], roles: Collection[Role], use: Callable[[Members], None]
    ) -> str:
        """Apply an answer; return why it is not used, or an empty text.

        Args:
          found: workers in the answer, each address once.
          roles: roles whose workers the answer lists.
          use: receives the members if they change.
        """
        before, new = [*self._absent], {*found}
        if not found:
            return "no workers are named; the last known members stay"
        if (count := len(new.union(before))) > MAX_MEMBERS:
            return f"there would be {count} members; allowed: {MAX_MEMBERS}"
        named, alive = {one.address for one in found}, self._alive()
        # If the role or model at an address changed, the worker there was replaced.
        for member in [one for one in before if one.address in named and one not in new]:
            del self._absent[member]
        is_news = not new.issubset(self._absent)
        self._is_partial |= any(self._absent.get(one) and one.address in alive for one in found)
        self._absent |= dict.fromkeys(found, 0)
        if named & alive:
            of_roles = [one for one in self._absent if one.role in roles]
            partial = PARTIAL_ROUNDS * len(of_roles) // len(new)
            for member in [one for one in of_roles if one not in new]:
                self._absent[member] += 1
                is_alive = member.address in alive
                enough = partial if is_alive and self._is_partial else self._absent_answers
                is_kept = is_news or (is_alive and self._keeps_alive)
                if self._absent[member] >= enough and not is_kept:
                    del self._absent[member]
        if [*self._absent] != before:
            use(Members((*self._absent,)))
        return ""
