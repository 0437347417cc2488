"""Blocks go out and come in through staging memory as the same bytes; its memory comes back."""

from __future__ import annotations

import gc

import torch

from engine.gpu.staging import Staging


def pool(num_blocks: int = 8) -> torch.Tensor:
    torch.manual_seed(6)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(num_blocks, 2, 2, 4, 2, 8, device=place)


def test_bytes_pass_unchanged_and_memory_comes_back() -> None:
    source, target = pool(), pool() * 0
    out, into = Staging(source, 3), Staging(target, 3)
    for blocks in ([5, 1], [3], [2, 7, 4], [6]):
        payload = out.export_blocks(blocks)
        assert bytes(payload) == source[blocks].cpu().numpy().tobytes()
        received = torch.frombuffer(payload, dtype=torch.uint8).view(len(blocks), -1).numpy()
        into.import_blocks(blocks, received)
        into.await_imports()
        assert torch.equal(target[blocks], source[blocks])
        del payload, received
    assert out.unpinned_copies == into.unpinned_copies == 0


def test_memory_that_is_held_elsewhere_is_not_written() -> None:
    source = pool()
    staging = Staging(source, 2)
    held = staging.export_blocks([1, 2])
    expected = bytes(held)
    more = staging.export_blocks([3])
    assert staging.unpinned_copies == 1
    assert bytes(held) == expected
    view = held[8:]
    del held, more
    gc.collect()
    staging.export_blocks([4])
    assert staging.unpinned_copies == 2
    del view
    gc.collect()
    staging.export_blocks([4])
    assert staging.unpinned_copies == 2
