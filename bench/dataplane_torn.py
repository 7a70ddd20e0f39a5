"""Readers without a lock against a writer that re-uses slots: wrong bytes, and a control."""

from __future__ import annotations

from collections.abc import Iterator

from bench import torn_reads
from bench.harness import Bar, Context, Part, Reading


def measure(context: Context) -> Iterator[Reading]:
    """The directory as it is, then the same without the second comparison."""
    if context.wants("directory_torn_reads"):
        yield _reading("directory_torn_reads", context.several(60, 5), True)
    if context.wants("directory_control_wrong"):
        yield _reading("directory_control_wrong", context.several(15, 5), False)


def _reading(name: str, seconds: int, second_comparison: bool) -> Reading:
    counts = torn_reads.run(seconds, second_comparison)
    seen = ", ".join(f"{count} {what}" for what, count in counts.items())
    return Reading(name, counts["wrong"], f"copies in {seconds} s: {seen}")


PART = Part(
    "the directory with a concurrent writer, 75 s",
    (
        Bar("directory_torn_reads", "blocks", at_most=0),
        Bar("directory_control_wrong", "blocks", at_least=1),
    ),
    measure,
)
