"""vLLM offline with kvstore: the second process finds what the first one computed.

    kvstore serve &
    python examples/vllm_offline.py MODEL        # twice

The second run's prompts share a long prefix with the first run's; it comes out of the store.
"""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams

QUESTIONS = ("Who may open a ticket?", "What is a severity-one incident?", "Who is on call?")


def main(model: str) -> None:
    llm = LLM(
        model,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "engine_adapter.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
    )
    manual = "\n".join(f"Rule {n}: requests of kind {n} go to desk {n % 7}." for n in range(120))
    for question in QUESTIONS:
        began = time.perf_counter()
        (output,) = llm.generate(
            f"{manual}\n\nQuestion: {question}\nAnswer:",
            SamplingParams(temperature=0.0, max_tokens=16),
            use_tqdm=False,
        )
        print(
            f"{time.perf_counter() - began:6.2f} s, {output.num_cached_tokens} of "
            f"{len(output.prompt_token_ids or ())} prompt tokens not computed: "
            f"{output.outputs[0].text.strip()!r}"
        )


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(sys.argv[1])
