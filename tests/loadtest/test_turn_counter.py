"""The counter of an event loop's turns, which benchmarks add to a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from loadtest.harness.turn_counter import TurnCounter, TurnCounts, TurnFile

if TYPE_CHECKING:
    from pathlib import Path


def test_the_turn_with_most_cpu_is_told_to_another_process(tmp_path: Path) -> None:
    file = TurnFile(tmp_path / "turns")

    async def main() -> None:
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        sum(range(300_000))
        for _ in range(5):
            await trio.lowlevel.checkpoint()

    trio.run(main, instruments=[TurnCounter(file)])
    seen = TurnFile(tmp_path / "turns").read()
    assert seen.turns >= 10
    assert seen.cpu_s > 0.0
    assert 0.0 < seen.wall_s <= seen.longest_wall_s
    file.write(TurnCounts())
    assert TurnFile(tmp_path / "turns").read() == TurnCounts()
