"""Blocks go out and come in through staging memory as the same bytes; its memory comes back."""

from __future__ import annotations

import numpy as np
import torch

from engine.gpu.staging import Staging


def pool(num_blocks: int = 8) -> torch.Tensor:
    torch.manual_seed(6)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(num_blocks, 2, 2, 4, 2, 8, device=place)


def test_bytes_pass_unchanged_and_memory_comes_back() -> None:
    source, target = pool(), pool() * 0
    out, into = Staging(source, 1), Staging(target, 3)
    for blocks in ([5, 1], [3], [2, 7, 4], [6]):
        expected = source[blocks].cpu().numpy().tobytes()
        memory = memoryview(bytearray(len(expected)))
        assert out.pin(memory)
        payload = np.frombuffer(memory, dtype=np.uint8).reshape(len(blocks), -1)
        out.export_blocks(blocks, payload)
        assert bytes(memory) == expected
        into.import_blocks(blocks, payload)
        payload[:] = 0  # the frame is gone as soon as it was taken in
        into.await_imports()
        assert torch.equal(target[blocks], source[blocks])
        if source.is_cuda:
            torch.cuda.synchronize()
    assert into.unpinned_copies == 0


def test_more_than_the_memory_holds_comes_in_all_the_same() -> None:
    source, target = pool(), pool() * 0
    into = Staging(target, 2)
    blocks = [4, 2, 6]
    into.import_blocks(blocks, source[blocks].cpu().view(3, -1).view(torch.uint8).numpy())
    into.await_imports()
    assert torch.equal(target[blocks], source[blocks])
    assert into.unpinned_copies == 1
