"""Test helper: rollouts as control describes them to servers."""

from __future__ import annotations

from msgspec.structs import replace

from transport.rollout_protocol import RolloutNote, RolloutPhase, RolloutView, ShadowComparison

BEGAN_AT = 1_700_000_000.0
SHADOW = ShadowComparison(
    pairs=40,
    failed=2,
    skipped=3,
    rows_while_waiting=0,
    same_finish=38,
    equal_tokens=900,
    tokens=(1000, 990),
    ttft_s=(4.0, 4.4),
    itl_s=(0.8, 0.84),
)
VIEW = RolloutView(
    id="r1",
    model="chat",
    stable="chat-1",
    candidate="chat-2",
    candidate_digest="sha256:" + "0123456789abcdef" * 4,
    phase=RolloutPhase.CANARY,
    step=2,
    shares=(0.01, 0.1, 1.0),
    began_at=BEGAN_AT,
    said="chat-2 has had 120 requests from 14 buckets of users; it needs 200 from 20",
    counts={"errors": (990, 10, 117, 3), "ttft": (500, 5, 60, 0)},
    recent={"errors": (400, 4, 38, 2), "ttft": (200, 2, 20, 0)},
    cost=(0.95, 1.21),
    shadow=SHADOW,
    history=(
        RolloutNote(BEGAN_AT - 120, RolloutPhase.PREPARING, 0, "started", "alice"),
        RolloutNote(BEGAN_AT, RolloutPhase.CANARY, 2, "step 1 has passed"),
    ),
)
"""A rollout in its second step."""
ENDED = replace(
    VIEW,
    id="r0",
    phase=RolloutPhase.ROLLED_BACK,
    began_at=BEGAN_AT - 3600,
    said="alice rolled it back",
    counts={},
    recent={},
    cost=None,
    shadow=ShadowComparison(),
)
"""An earlier rollout of the same candidate."""
