"""Decides which workers stay members when answers of DNS or Redis name others, fewer or none.

Such a store may be down, late, empty or wrong, so an answer that lacks a worker proves little:

- an answer without any worker that heartbeats reach changes nothing about those it lacks;
- a worker is dropped when several answers in a row lack it; one that registers itself when it is
  dead, too, and an answer lacks it;
- answers may be partial (round robin, a limit on addresses). An answer that names a new worker
  drops no other. After one that brings a living worker back, many more answers must lack a living
  worker.

A dropped worker gets nothing new and keeps its streams (`Links.set_members`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config.members import MAX_MEMBERS, Member, Members

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Set

    from triolet.ids import Role

PARTIAL_ROUNDS: Final = 20
"""If answers are partial, as many answers in a row must lack a living worker as could have named
all workers so many times. Answers that draw at random leave a worker out that often once in e^20
cases."""


class MemberTable:
    """The members according to one store.

    Args:
      members: those of the settings; they count like members of an earlier answer.
      alive: returns the addresses of the workers that heartbeats reach.
      absent_answers: answers in a row that must lack a worker before it is dropped; None if workers
        register themselves. Then one that is dead is dropped at once, and no other: an operator
        removes a worker by draining it.
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
          found: the workers that it names, each address once.
          roles: roles for which it names all workers.
          use: receives the members if they change.
        """
        before, new = [*self._absent], {*found}
        if not found:
            return "no workers are named; the last known members stay"
        if (count := len(new.union(before))) > MAX_MEMBERS:
            return f"there would be {count} members; allowed: {MAX_MEMBERS}"
        named, alive = {one.address for one in found}, self._alive()
        # Another role or model at an address: the worker there was replaced.
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
