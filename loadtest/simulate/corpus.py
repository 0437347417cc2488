"""Seeds that are run again with every change: those that once found something, and those that go
where few do.

What a number stands for changes with the code that draws from it; what it once found is held by an
ordinary test beside the code. Knows numbers and reasons.
"""

from __future__ import annotations

from typing import Final

CORPUS: Final[dict[int, str]] = {}
