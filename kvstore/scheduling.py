"""Turns of the processor: short ones for threads that answer, the usual ones for those that work.

Primitives, for the calling thread and those it starts: `short_turns`, `usual_turns`.

Linux 6.12 and later let a thread that asks for short turns wake up ahead of those with long ones;
its share of the processor stays what it is, and no privilege is needed. On a host whose cores are
all busy, as beside an engine, that is an answer at once instead of one after everybody's turn.
"""

from __future__ import annotations

import ctypes
import os
import struct

SHORT_SECONDS = 0.0005
"""Well below the kernel's usual 1.4 to 3 ms, and no shorter than most calls: a thread whose turn
ends in the middle of a call waits for everybody else's. Measured in docs/performance.md."""
_CALLS = {"x86_64": 314, "aarch64": 275}
"""sched_setattr by machine; the C library has no name for it before glibc 2.41."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime (the turn), deadline, period."""


def short_turns() -> bool:
    """False where the machine or a sandbox does not allow it; older kernels ignore it."""
    return _set_turn(int(SHORT_SECONDS * 1e9))


def usual_turns() -> bool:
    """The kernel's default."""
    return _set_turn(0)


def _set_turn(turn_ns: int) -> bool:
    number = _CALLS.get(os.uname().machine)
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, 0, nice, 0, turn_ns, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
