"""Readers without a lock against a writer that re-uses slots: wrong bytes, and a control."""

from __future__ import annotations

from collections.abc import Iterator

from bench import torn_reads
from bench.harness import Bar, Context, Part, Reading


def measure(context: Context) -> Iterator[Reading]:
    """The real directory, then the same without the second comparison."""
    if context.wants("directory_torn_reads"):
        seconds = context.several(60, 5)
        context.step(f"{seconds} s of re-use against readers")
        seen = torn_reads.run(seconds, second_comparison=True)
        yield Reading("directory_torn_reads", seen.wrong, str(seen))
    if context.wants("directory_control_wrong"):
        seen = torn_reads.run(context.several(15, 5), second_comparison=False)
        yield Reading("directory_control_wrong", seen.wrong, str(seen))


PART = Part(
    "the directory with a concurrent writer",
    (
        Bar("directory_torn_reads", "blocks", at_most=0),
        Bar("directory_control_wrong", "blocks", at_least=1),
    ),
    measure,
)
