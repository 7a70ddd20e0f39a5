"""The adapter over a device's transfer engine: same logits, whatever the device does late.

The device is the stand-in; the model computes on the CPU, in buffers that lie in the stand-in's
memory. Adapter, transfer engine, client and daemon are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.quantised import SCHEMES, Scheme, packed, restored
from kvstore.client.inplace import find_in_host
from kvstore.errors import DeviceError, InvalidRequest
from kvstore.testing.fake_device import FakeDevice
from tests.conftest import DaemonProcess
from tests.e2e.kit import eventually
from tests.engines.kit import BLOCK, accelerator, gemma, llama, plain, prompt, run, settled, torch
from tests.engines.test_faults import during_forward, stored_on_nvme
from tests.unit.test_quantised import bodies

Attach = Callable[..., Any]
MakeDaemon = Callable[..., DaemonProcess]


class StandIn(accelerator.Accelerator):
    """Torch computes at once; so that it sees what its stream waited for, that runs first."""

    def __init__(self, seed: int, scheme: Scheme = "int8") -> None:
        self.fake = FakeDevice(seed, mood="random", kernels=bodies(scheme))
        lanes = Lanes(self.fake, now=time.monotonic, pause=lambda: self.fake.advance(50))
        super().__init__(DeviceTransfers(lanes, ThreadPoolExecutor(2)), torch.device("cpu"))
        self.compute = self.fake.make_compute_stream()

    def stream(self) -> int:
        return self.compute

    def empty(self, like: Any, shape: Any) -> Any:
        count = torch.Size(shape).numel()
        if not count:
            return like.new_empty(tuple(shape))
        size = count * like.element_size()
        memory = torch.from_numpy(self.fake.bytes_at(self.fake.allocate(size), size))
        return memory.view(like.dtype).reshape(tuple(shape))

    def arrived(self) -> None:
        event = self.fake.make_event()
        self.fake.record(event, self.compute)
        while not self.fake.is_done(event):
            self.fake.advance(50)

    def computed(self) -> None:
        self.arrived()


@pytest.fixture
def device() -> Iterator[StandIn]:
    found = StandIn(1)
    yield found
    found.transfers.close()
    assert found.fake.error == ""


@pytest.mark.parametrize("model", [llama, gemma])
def test_hits_equal_the_uncached_run(attach: Attach, device: StandIn, model: Any) -> None:
    attached = attach(model(torch.bfloat16), accelerator=device)
    ids = prompt(5 * BLOCK + 3)
    expected = plain(attached, ids)
    assert run(attached.model, ids).differs(expected) == 0
    settled(attached)
    for _ in range(3):
        assert run(attached.model, ids).differs(expected) == 0
        assert attached.last.hit_tokens == 5 * BLOCK
    assert attached.statistics().saved_blocks == 5
    moved = device.transfers.describe()["bytes_by_way"]
    assert sum(moved.values()) >= 4 * 5 * attached._tools.tensors.block_layout.block_bytes


def test_blocks_come_from_nvme(attach: Attach, device: StandIn, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    attached = attach(llama(), daemon.socket, accelerator=device)
    ids, expected = stored_on_nvme(attached, daemon, 5 * BLOCK + 3)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.nvme_tokens == 5 * BLOCK


def test_the_daemon_dies_in_the_middle_of_a_load(
    attach: Attach, device: StandIn, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon().start()
    attached = attach(llama(), daemon.socket, accelerator=device, deadline_seconds=2.0)
    ids, expected = stored_on_nvme(attached, daemon, 5 * BLOCK + 3)
    with during_forward(attached.model, daemon.kill):
        assert run(attached.model, ids).differs(expected) == 0
    assert run(attached.model, prompt(BLOCK)).tokens.shape[1] > BLOCK


def test_padded_batches_and_beams(attach: Attach, device: StandIn) -> None:
    attached = attach(llama(), exact=False, accelerator=device)
    ids, mask = prompt(5 * BLOCK + 7, rows=2), torch.ones(2, 5 * BLOCK + 7, dtype=torch.long)
    ids[0, :9], mask[0, :9] = 0, 0
    arguments = {"attention_mask": mask, "prefill_chunk_size": None}
    expected = plain(attached, ids, **arguments)
    for turn in range(2):
        assert run(attached.model, ids, **arguments).is_near(expected)
        assert (attached.last.hit_tokens > 0) == (turn > 0)
        settled(attached)
    one, beams = ids[1:], {"do_sample": False, "max_new_tokens": 4, "num_beams": 3}
    with attached.paused():
        tokens = attached.model.generate(one, **beams)
    assert (attached.model.generate(one, **beams) == tokens).all()
    assert attached.last.hit_tokens > 0


def test_a_load_whose_blocks_were_cleared_is_thrown_away(attach: Attach, device: StandIn) -> None:
    attached = attach(llama(), accelerator=device)
    ids = prompt(5 * BLOCK + 3)
    expected = plain(attached, ids)
    run(attached.model, ids)
    settled(attached)
    handle = attached.namespace()

    source = find_in_host(handle, handle.chain(ids[0, : 5 * BLOCK].numpy()))

    def clear() -> None:
        handle.clear()
        eventually(lambda: not source.valid(), "the slots were reclaimed")

    with during_forward(attached.model, clear):
        assert run(attached.model, ids).differs(expected) == 0
    assert (attached.last.reruns, attached.last.hit_tokens) == (1, 0)


def test_a_device_that_refuses_is_a_miss_with_its_reason(
    attach: Attach, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = attach(llama(), accelerator=device)
    ids = prompt(3 * BLOCK + 3)
    expected = plain(attached, ids)
    run(attached.model, ids)
    settled(attached)

    def refuse(*_: Any) -> None:
        raise DeviceError("it fell off the bus")

    with monkeypatch.context() as patched:
        patched.setattr(device.transfers, "start_load", refuse)
        assert run(attached.model, ids).differs(expected) == 0
    assert "fell off the bus" in attached.last.miss_reason
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.hit_tokens == 3 * BLOCK


def pieces_of(model: Any, ids: Any) -> Any:
    """Keys and values of the first five blocks after a call of generate, float32, by pieces."""
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, return_dict_in_generate=True
    )
    layers = output.past_key_values.layers
    both = [each[0, :, : 5 * BLOCK].float() for one in layers for each in (one.keys, one.values)]
    return torch.stack(both).reshape(len(both) * both[0].shape[0] * 5, -1).numpy()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_eight_bit_kv_is_half_the_bytes_and_another_namespace(
    attach: Attach, scheme: Scheme
) -> None:
    device, model, ids = StandIn(1, scheme), llama(torch.bfloat16), prompt(5 * BLOCK + 3)
    attached = attach(model, accelerator=device, exact=False)
    run(model, ids, prefill_chunk_size=None)
    settled(attached)
    whole = attached.namespace()
    attached.detach()
    attached = attach(model, accelerator=device, exact=False, kv_dtype=scheme)
    computed = pieces_of(model, ids)
    assert attached.last.hit_tokens == 0
    settled(attached)
    assert 0.5 < attached.namespace().layout.layer_bytes / whole.layout.layer_bytes < 0.6
    for _ in range(2):
        assert np.array_equal(pieces_of(model, ids), restored(packed(computed, scheme), scheme))
        assert attached.last.hit_tokens == 5 * BLOCK
    ways: Any = attached.transfers()["bytes_by_way"]
    assert ways["quantising"] == 15 * attached.namespace().layout.block_bytes
    device.transfers.close()
    assert device.fake.error == ""


def test_eight_bit_kv_is_refused_by_name_where_it_cannot_be(
    attach: Attach, device: StandIn
) -> None:
    model = llama(torch.bfloat16)
    for settings, reason in (
        ({"accelerator": device, "kv_dtype": "int8"}, "exact=False"),
        ({"exact": False, "kv_dtype": "int8"}, "packed by a GPU"),
        ({"accelerator": device, "exact": False, "kv_dtype": "int4"}, "cannot be kept as int4"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            attach(model, **settings)
    with pytest.raises(InvalidRequest, match="float32"):
        attach(llama(), accelerator=device, exact=False, kv_dtype="int8")
