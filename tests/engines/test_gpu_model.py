"""What a GPU check measures with a model, tried at a tiny size on the stand-in."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

from tests.engines.kit import llama, torch
from tests.engines.test_device import StandIn


def test_a_bed_gives_all_figures_and_a_timeline(tmp_path: Path) -> None:
    from bench import gpu_model  # imports torch

    device = StandIn(2)
    model = llama(torch.bfloat16)

    def computed(*_: object) -> None:  # torch computes at once: let it take time on its stream
        def tick() -> None:
            device.fake._streams.now_seconds += 1e-4

        device.fake.enqueue(device.compute, tick)

    for layer in model.model.layers:
        layer.register_forward_hook(computed)
    sizes = gpu_model.Sizes(64, 16, 16, decode_rows=2, decode_tokens=32, decode_steps=5, rounds=2)
    bed = gpu_model.Bed(device, model, sizes)
    bed.wait_pinned()
    found = {reading.name: reading for reading in gpu_model.figures(bed)}
    assert set(found) == {
        "overlap_hidden_share",
        "ttft_vs_recompute",
        "decode_slowdown_while_loading",
    }
    assert all(math.isfinite(reading.value) for reading in found.values())
    spans = gpu_model.timeline(bed)
    for stream in ("copy", "compute"):
        assert len(spans[stream]) == len(model.model.layers)
        assert all(begin <= end for begin, end in spans[stream])
    for (_, arrived), (_, computed_at) in zip(spans["copy"], spans["compute"], strict=True):
        assert arrived <= computed_at
    picture = tmp_path / "timeline.png"
    gpu_model.draw(spans, picture)
    head = picture.read_bytes()
    assert head.startswith(b"\x89PNG")
    start = head.index(b"IDAT") + 4
    assert zlib.decompressobj().decompress(head[start:])
    device.transfers.close()
    assert device.fake.error == ""
