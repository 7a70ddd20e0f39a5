"""What the scheduler's half remembers of one request.

Primitives: `Tracked`, `contents_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine_adapter.vllm_lookup import EngineRequest, Lookup
from kvstore.fingerprint import Chain, Content

LOADS_MAX = 2
"""Loads of one request between two preemptions: one that fails again and again is computed."""
NOT_TOLD = -1
"""Tokens saved, while the lookup has not told what is stored."""


class Tracked:
    """`lookup` owns `chains` until it is done. Made for every request as it arrives: most values
    are the class's until they change."""

    is_refreshed = False
    """The answer had grown old, and was asked for again: once, as steps may be longer than that."""
    chains: Sequence[Chain] = ()
    hashed_tokens = 0
    computed_tokens = 0
    """What the engine's own cache had when it asked last."""
    has_failed = False
    """A load failed: what the lookup found is not to be had."""
    loads = 0
    is_slow = False
    """A load of it was predicted to be slower than computing."""
    load_tokens = 0
    """Of the newest one."""
    is_loading = False
    is_layerwise = False
    from_below = 0
    saved_tokens = NOT_TOLD
    """Leading tokens whose blocks are stored or on their way, in every lane."""
    save_from = 0
    """No lane has a block to save before so many tokens are computed."""
    due = 0
    """The step in which that may be."""

    def __init__(self, lookup: Lookup) -> None:
        self.request = lookup.request
        self.lookup: Lookup | None = lookup

    def take_lookup(self) -> bool:
        """Whether what the lookup found may be used from now on."""
        lookup = self.lookup
        if lookup is None or not lookup.is_done or not lookup.chains:
            return False
        if self.saved_tokens == NOT_TOLD:
            self.chains, self.hashed_tokens = lookup.chains, lookup.named_tokens
            self.saved_tokens = self.save_from = lookup.tokens
        return True

    def forget_lookup(self) -> None:
        """The next one starts from what is hashed, unless a thread still hashes."""
        if self.lookup is not None:
            if not self.take_lookup():
                self.chains, self.hashed_tokens = (), 0
            self.lookup.end()
        self.lookup, self.saved_tokens, self.save_from = None, NOT_TOLD, 0
        self.is_refreshed = self.has_failed = False

    def end_lookup(self) -> None:
        """Its blocks are no longer needed; what it found still counts."""
        if self.lookup is not None:
            self.lookup.end()

    def load_failed(self) -> None:
        """What did not come is computed, and stored again."""
        self.has_failed = True
        if self.saved_tokens != NOT_TOLD:
            self.saved_tokens = self.save_from = self.computed_tokens

    def name_computed(self, tokens: int) -> None:
        """Hash the request's tokens up to `tokens`: a block's worth of them, while it decodes."""
        if tokens > self.hashed_tokens:
            fresh = self.request.all_token_ids[self.hashed_tokens : tokens]
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
