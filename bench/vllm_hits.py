"""What a hit is worth: time to first token against the engine's own cache, recompute, and vLLM's
own offloading.

Primitives: `PARTS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.daemons import DaemonProcess
from bench.harness import OUT, Bar, Context, Part, Reading, pairs
from bench.vllm_child import DTYPE, EngineProcess

TOKENS = 1900
GEMMA = OUT / "models" / "gemma3-270m"
DAEMON = {"host.bytes": "1GiB", "nvme.enabled": "false"}
OPTIONS = {
    "dtype": DTYPE,
    "kv_cache_memory_bytes": 512 << 20,
    "max_num_batched_tokens": 2048,
    "block_size": 128,
    "disable_hybrid_kv_cache_manager": False,
}
OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "bench.vllm_offload_spec",
        "cpu_bytes_to_use": 512 << 20,
    },
}


def _gemma(context: Context) -> Iterator[Reading]:
    if not (GEMMA / "config.json").exists():
        raise RuntimeError(f"{GEMMA} is missing; `make demo` converts the model")
    folder = context.work / "gemma"
    folder.mkdir()
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(Path(folder), DAEMON))
        engine = stack.enter_context(
            EngineProcess(GEMMA, daemon.socket, extra={"plan": True}, **OPTIONS)
        )
        own: list[float] = []
        hits: list[float] = []
        cold: list[float] = []
        wanted = (TOKENS - 1) // 128 * 128
        for turn in range(context.several(7, 3) + 1):
            number = 100 + turn
            first = engine.first_token(number, TOKENS)
            again = engine.first_token(number, TOKENS)
            engine.forget()
            hit = engine.first_token(number, TOKENS)
            if (first[1], again[1], hit[1]) != (0, wanted, wanted):
                raise RuntimeError(f"cached tokens: {first[1]}, {again[1]}, {hit[1]}")
            engine.forget()
            if turn:  # the first turn meets shapes that the engine never saw
                cold.append(first[0])
                own.append(again[0])
                hits.append(hit[0])
        medians = [float(np.median(samples)) for samples in (hits, own, cold)]
        setting = (
            f"Gemma 3 270M {DTYPE}, {TOKENS} tokens, {wanted} of them from host memory, medians of "
            f"{len(hits)}: hit {medians[0]:.3g} s, own prefix cache {medians[1]:.3g} s, full "
            f"prefill {medians[2]:.3g} s"
        )
        yield _ratio("hit_ttft_vs_own_prefix_cache", hits, own, setting)
        yield _ratio("hit_ttft_vs_recompute", hits, cold, setting)


def _ratio(name: str, measured: list[float], plain: list[float], setting: str) -> Reading:
    ratios = [ours / base for ours, base in zip(measured, plain, strict=True)]
    low, high = np.percentile(ratios, [25, 75])
    note = f"{setting}; p25..p75 of the ratios {low:.3g}..{high:.3g}"
    return Reading(name, float(np.median(ratios)), note)


def _native(context: Context) -> Iterator[Reading]:
    from bench.vllm_engine import tiny_llama

    model = tiny_llama(context.work / "hit-llama", layers=8)
    folder = context.work / "native"
    folder.mkdir()
    options = {**OPTIONS, "block_size": 32, "disable_hybrid_kv_cache_manager": True}
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(Path(folder), DAEMON))
        ours = stack.enter_context(
            EngineProcess(model, daemon.socket, extra={"plan": True}, **options)
        )
        theirs = stack.enter_context(EngineProcess(model, None, transfer=OFFLOAD, **options))

        def hit(engine: EngineProcess, turn: int) -> float:
            engine.first_token(turn, TOKENS)
            engine.forget()
            seconds, cached = engine.first_token(turn, TOKENS)
            engine.forget()
            if cached < TOKENS - 64:
                raise RuntimeError(f"a hit of {cached} tokens only")
            return seconds

        found = pairs(
            context.several(9, 3), lambda turn: hit(theirs, turn), lambda turn: hit(ours, turn)
        )
    yield Reading(
        "vs_native_offload_host",
        found.ratio,
        found.note(f"OffloadingConnector, host tier, {TOKENS} tokens of a tiny Llama"),
    )


def _files(context: Context) -> Iterator[Reading]:
    """Both from disk: their host tier emptied by a reset, ours by a restart of the daemon."""
    from bench.vllm_engine import tiny_llama

    model = tiny_llama(context.work / "disk-llama", layers=8)
    folder = context.work / "disk"
    folder.mkdir()
    options = {**OPTIONS, "block_size": 32, "disable_hybrid_kv_cache_manager": True}
    tiers = [{"type": "fs", "root_dir": str(context.work / "fs")}]
    extra = {**OFFLOAD["kv_connector_extra_config"], "secondary_tiers": tiers}
    transfer = {**OFFLOAD, "kv_connector_extra_config": {**extra, "spec_name": "TieredSpec"}}
    per_round, theirs_seconds, our_seconds = 4, list[float](), list[float]()
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(Path(folder), {"host.bytes": "512MiB"}))
        ours = stack.enter_context(
            EngineProcess(model, daemon.socket, extra={"plan": True}, **options)
        )
        theirs = stack.enter_context(EngineProcess(model, None, transfer=transfer, **options))
        boot_id = ours.wait_life(0)
        for turn in range(context.several(4, 2)):
            numbers = [1000 * (turn + 1) + at for at in range(per_round)]
            for number in numbers:
                theirs.first_token(number, TOKENS)
                ours.first_token(number, TOKENS)
            theirs.first_token(10**6 + turn, TOKENS)  # its last store ends with a later step
            theirs.forget_all()
            ours.forget()
            daemon.stop()
            daemon.start()
            boot_id = ours.wait_life(boot_id)
            for number in numbers:
                for engine, seconds in ((theirs, theirs_seconds), (ours, our_seconds)):
                    took, cached = engine.first_token(number, TOKENS)
                    if cached < TOKENS - 64:
                        name = "ours" if engine is ours else "OffloadingConnector"
                        raise RuntimeError(f"{name}: a hit of {cached} tokens only")
                    if turn:  # the first round meets new shapes
                        seconds.append(took)
    setting = (
        f"{TOKENS} tokens of a tiny Llama from disk: ours {np.median(our_seconds):.3g} s, "
        f"OffloadingConnector with its fs tier {np.median(theirs_seconds):.3g} s, "
        f"{len(our_seconds)} pairs"
    )
    yield _ratio("vs_native_offload_fs", our_seconds, theirs_seconds, setting)


PARTS = (
    Part(
        "hits on Gemma 3 270M",
        (
            Bar("hit_ttft_vs_own_prefix_cache", "ratio", at_most=1.5),
            Bar("hit_ttft_vs_recompute", "ratio", at_most=0.25),
        ),
        _gemma,
    ),
    Part(
        "hits beside vLLM's own offloading",
        (Bar("vs_native_offload_host", "ratio", at_most=1.1),),
        _native,
    ),
    Part(
        "hits from disk beside vLLM's own",
        (Bar("vs_native_offload_fs", "ratio", at_most=1.1),),
        _files,
    ),
)
