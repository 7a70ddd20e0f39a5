"""Turns of the processor, as the kernel tells them."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from kvstore import scheduling

GETATTR = {"x86_64": 315, "aarch64": 274}


def turn_ns() -> int:
    """Of the calling thread; what older kernels leave out reads as 0."""
    layout = scheduling._ATTRIBUTES
    found = ctypes.create_string_buffer(layout.size)
    number = GETATTR[os.uname().machine]
    assert not ctypes.CDLL(None).syscall(number, 0, found, layout.size, 0)
    return int(layout.unpack(found.raw)[5])


def in_a_thread(work):
    """What `work` returns; its turns are its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_turns_are_inherited_until_they_are_set_back():
    def work():
        usual = turn_ns()
        if not (usual and scheduling.short_turns()):
            return None
        short, inherited = turn_ns(), in_a_thread(turn_ns)
        scheduling.usual_turns()
        return usual, short, inherited, turn_ns()

    turns = in_a_thread(work)
    if turns is None:
        pytest.skip("this kernel has no turns to set")
    usual, short, inherited, back = turns
    assert short == inherited == scheduling.SHORT_SECONDS * 1e9 < usual == back


def test_elsewhere_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(scheduling, "_CALLS", {})
    assert not scheduling.short_turns()
