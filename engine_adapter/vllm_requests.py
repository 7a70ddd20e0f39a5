"""What the scheduler's half remembers of one request.

Primitives: `Tracked`, `contents_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_adapter.vllm_lookup import EngineRequest, Lookup
from kvstore.fingerprint import Chain, Content

LOADS_MAX = 2
"""Loads of one request between two preemptions: one that fails again and again is computed."""


@dataclass(slots=True)
class Tracked:
    """`lookup` owns `chains` until it is done."""

    request: EngineRequest
    plain_reason: str = ""
    """Why this request neither loads nor saves; "" if it does."""
    lookup: Lookup | None = None
    is_refreshed: bool = False
    """The lookup was made again because it had waited long in the queue."""
    chains: Sequence[Chain] = ()
    hashed_tokens: int = 0
    computed_tokens: int = 0
    """What the engine's own cache had when it asked last."""
    has_failed: bool = False
    """A load failed: what the lookup found is not to be had."""
    loads: int = 0
    is_loading: bool = False
    is_layerwise: bool = False
    from_below: int = 0
    saved: list[int] = field(default_factory=list)
    """A lane: leading blocks that are stored or on their way; empty until the lookup told."""

    def take_lookup(self) -> bool:
        """Whether what the lookup found may be used from now on."""
        lookup = self.lookup
        if lookup is None or not lookup.is_done or not lookup.chains:
            return False
        if not self.saved:
            self.chains = lookup.chains
            self.hashed_tokens = max(self.hashed_tokens, lookup.prompt_tokens)
            self.saved = [lookup.tokens // chain.block_tokens for chain in self.chains]
        return True

    def forget_lookup(self) -> None:
        """The next one starts from what is hashed, unless a thread still hashes."""
        if self.lookup is not None:
            if not self.take_lookup():
                self.chains, self.hashed_tokens = (), 0
            self.lookup.end()
        self.lookup, self.saved = None, []
        self.is_refreshed = self.has_failed = False

    def end_lookup(self) -> None:
        """Its blocks are no longer needed; what it found still counts."""
        if self.lookup is not None:
            self.lookup.end()

    def load_failed(self) -> None:
        """What did not come is computed, and stored again."""
        self.has_failed = True
        if self.saved:
            self.saved = [self.computed_tokens // chain.block_tokens for chain in self.chains]

    def name_computed(self, tokens: int) -> None:
        """Hash the request's tokens up to `tokens`; most calls have a block's worth of work."""
        if tokens > self.hashed_tokens:
            fresh = list(self.request.all_token_ids[self.hashed_tokens : tokens])
            for chain in self.chains:
                chain.extend(fresh)
            self.hashed_tokens = tokens


def contents_of(request: EngineRequest, adapter_digest: Callable[[Any], str]) -> list[Content]:
    """What besides token ids shapes a request's blocks: the first block is told, and thereby all.

    `adapter_digest(lora_request)` names a LoRA by its content. Raises KVStoreError from it.
    """
    contents = []
    if request.cache_salt:
        contents.append(Content(0, 1, b"salt:" + request.cache_salt.encode()))
    if request.lora_request is not None:
        contents.append(Content(0, 1, b"lora:" + adapter_digest(request.lora_request).encode()))
    for feature in request.mm_features:
        place = feature.mm_position
        digest = b"mm:" + feature.identifier.encode()
        contents.append(Content(place.offset, max(place.length, 1), digest))
    return contents
