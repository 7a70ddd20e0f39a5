"""Host memory and NVMe: what the value policy saves and writes, against LRU.

LRU writes to NVMe when a block leaves host memory ("on demotion"), or when it comes ("through");
ancestors first on all sides, and a promoted block keeps its copy. The value policy writes what it
admits, without a write budget: what it leaves out it does not find worth writing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from bench.harness import Bar, Context, Part, Reading
from bench.replay_cache import MODEL_8B, Outcome, Tiers
from bench.replay_run import replay_shown
from bench.replay_single import VALUE, infinite, trace_of

TRACE = "conversation"
_NET = Bar("two_tier_1_10_net_vs_lru", "ratio", at_least=1.12)
_VS_DEMOTION = Bar("two_tier_1_10_nvme_bytes_vs_demotion", "ratio", at_most=0.75)
_VS_THROUGH = Bar("two_tier_1_10_nvme_bytes_vs_writethrough", "ratio", at_most=0.70)
_SAVED = Bar("two_tier_2_20_saved_vs_lru", "ratio", at_least=0.99)


@cache
def _rooms(host: int, nvme: int, is_quick: bool) -> tuple[int, int]:
    unique = trace_of(TRACE, is_quick).unique
    return max(1, unique * host // 100), max(1, unique * nvme // 100)


@cache
def lru(host: int, nvme: int, on_demotion: bool, is_quick: bool) -> Outcome:
    rooms = _rooms(host, nvme, is_quick)
    tiers = Tiers("lru", *rooms, write_on_demotion=on_demotion)
    return replay_shown(f"lru {host} % + {nvme} %", trace_of(TRACE, is_quick), tiers)


@cache
def value(host: int, nvme: int, is_quick: bool) -> Outcome:
    tiers = Tiers(VALUE, *_rooms(host, nvme, is_quick))
    return replay_shown(f"{VALUE} {host} % + {nvme} %", trace_of(TRACE, is_quick), tiers)


def _told(outcome: Outcome, is_quick: bool) -> str:
    whole = infinite(TRACE, is_quick)
    written = outcome.written_blocks * MODEL_8B.block_bytes / 1e9
    return (
        f"saved {100 * outcome.saved_seconds / whole:.1f} %, "
        f"net {100 * outcome.net_seconds / whole:.1f} %, {written:,.0f} GB written"
    )


def _measure(context: Context) -> Iterable[Reading]:
    quick = context.is_quick
    context.step("LRU on demotion, 1 % + 10 %")
    demotion = lru(1, 10, True, quick)
    context.step("value, 1 % + 10 %")
    ours = value(1, 10, quick)
    told = f"ours {_told(ours, quick)}; LRU on demotion {_told(demotion, quick)}"
    yield Reading(_NET.name, ours.net_seconds / demotion.net_seconds, told)
    is_equal = ours.saved_seconds >= demotion.saved_seconds
    verdict = "savings at least equal" if is_equal else "savings are LOWER: does not count"
    ratio = ours.written_blocks / demotion.written_blocks
    yield Reading(_VS_DEMOTION.name, ratio if is_equal else float("nan"), f"{verdict}; {told}")
    if context.wants(_VS_THROUGH.name):
        context.step("LRU, write-through")
        through = lru(1, 10, False, quick)
        is_equal = ours.saved_seconds >= through.saved_seconds
        ratio = ours.written_blocks / through.written_blocks
        note = f"{'' if is_equal else 'savings are LOWER; '}through: {_told(through, quick)}"
        yield Reading(_VS_THROUGH.name, ratio if is_equal else float("nan"), note)
    if context.wants(_SAVED.name):
        context.step("2 % + 20 %")
        large, base = value(2, 20, quick), lru(2, 20, True, quick)
        note = f"ours {_told(large, quick)}; LRU on demotion {_told(base, quick)}"
        yield Reading(_SAVED.name, large.saved_seconds / base.saved_seconds, note)


PART = Part("host memory and NVMe", (_NET, _VS_DEMOTION, _VS_THROUGH, _SAVED), _measure)
