"""Pinned memory: regions as a whole or not at all, rolled back, let go of, come again."""

from __future__ import annotations

import numpy as np
import pytest

from engine_adapter import pinning
from engine_adapter.pinning import PinnedArena
from kvstore.errors import DeviceError
from kvstore.testing.fake_device import FakeDevice


def test_a_region_is_pinned_whole_or_not_at_all() -> None:
    for failing in range(4):
        device = FakeDevice(mood="eager")
        device.fail_registrations = {failing}
        pins, region = PinnedArena(device, 100), np.zeros(350, np.uint8)
        pins.renew([region])
        assert pins.pin_next()
        assert pins.describe()["pinned_bytes"] == 0
        assert pins.failures
        pins.renew([np.zeros(50, np.uint8)])
        assert pins.pin_next()
        assert pins.describe()["pinned_bytes"] == 50
        device.register(region.ctypes.data, 350)  # nothing of it was left registered


@pytest.mark.parametrize("failing", [{1}, set()])
def test_memory_that_cannot_be_unpinned_is_kept(
    failing: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a roll-back, and at the end."""
    device = FakeDevice(mood="eager")
    device.fail_registrations = failing
    pins, region = PinnedArena(device, 40), np.zeros(64, np.uint8)

    def refuse(address: int) -> None:
        raise DeviceError("refused")

    monkeypatch.setattr(device, "unregister", refuse)
    monkeypatch.setattr(pinning, "_never_unmapped", kept := [])
    pins.renew([region])
    pins.pin_next()
    pins.close()
    assert [one is region for one in kept] == [True] * (1 if failing else 2)


def test_a_region_that_grows_old_while_it_is_pinned_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, (old, new) = FakeDevice(mood="eager"), np.zeros((2, 64), np.uint8)
    pins, register = PinnedArena(device), device.register

    def meanwhile(address: int, length: int) -> None:
        register(address, length)
        pins.renew([new])
        pins.drop_old(lambda start, stop: False)

    monkeypatch.setattr(device, "register", meanwhile)
    pins.renew([old])
    pins.pin_next()
    register(old.ctypes.data, 64)  # nobody has it any more
    assert pins.pin_next()
    assert pins.describe()["pinned_bytes"] == 64


def test_a_region_can_come_again() -> None:
    device, region = FakeDevice(mood="eager"), np.zeros(64, np.uint8)
    pins = PinnedArena(device)
    for _ in range(20):
        pins.renew([region])
        pins.renew([region])
        assert pins.pin_next()
        assert not pins.pin_next()
        at = np.array([region.ctypes.data, region.ctypes.data + 60], np.uint64)
        assert pins.is_pinned(at, np.array([64, 5], np.uint64)).tolist() == [True, False]
        pins.close()
