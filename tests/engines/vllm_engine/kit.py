"""What tests on the real engine share besides `bench.vllm_engine`: digests of blocks, patches.

Primitives:
  `Digests`   block bytes at save and after load, by name
  `patched`   a method wrapped for the time of a test
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run make test-vllm")

from bench.vllm_engine import (
    BLOCK,
    SECONDS_MAX,
    Answer,
    Engine,
    prompt,
    tiny_gemma,
    tiny_llama,
)

__all__ = [
    "BLOCK",
    "SECONDS_MAX",
    "Answer",
    "Digests",
    "Engine",
    "patched",
    "prompt",
    "tiny_gemma",
    "tiny_llama",
]


class Digests:
    """Records bytes of blocks by name when they are copied aside, and after they were loaded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from engine_adapter.vllm_host import HostLoad, HostSaver

        self.saved: dict[bytes, bytes] = {}
        self.loaded: dict[bytes, bytes] = {}
        self.wrong: list[bytes] = []
        take, run = HostSaver.take, HostLoad._run

        def recording_take(saver: Any, order: Any) -> None:
            self.saved.update(digests_of(saver._pages[order.lane], order))
            take(saver, order)

        def recording_run(task: Any) -> None:
            run(task)
            for part in task.parts:
                pages = task._pages[part.order.lane]
                for name, digest in digests_of(pages, part.order).items():
                    if name not in task.bad_names:
                        self.loaded[name] = digest
                        if self.saved.get(name, digest) != digest:
                            self.wrong.append(name)

        patch.setattr(HostSaver, "take", recording_take)
        patch.setattr(HostLoad, "_run", recording_run)


def digests_of(pages: Any, order: Any) -> dict[bytes, bytes]:
    """Name -> digest of what the engine's blocks hold now."""
    import numpy as np

    rows = np.empty((len(order.block_ids), pages.lane.layout.block_bytes), np.uint8)
    pages.gather(order.block_ids, rows)
    return {
        order.parent_of(at + 1): hashlib.blake2b(row, digest_size=16).digest()
        for at, row in enumerate(rows)
    }


def patched(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by around(original, *arguments)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *a, **k: around(original, *a, **k))
