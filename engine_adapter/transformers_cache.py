"""The Cache that generate works on: buffers at absolute positions, filled by store or model.

Primitives:
  `ModelShape`  layers, windows, heads, sizes and dtype of one model's keys and values
  `KVLayer`     one layer; waits for its stored part, keeps every token, shows the window
  `KVCache`     all layers of one request; `restore`, `restart`, `share`

Sliding-window layers keep all tokens of a request, so that its blocks can be stored whole and any
later cut be served; attention sees only the window, as in the stock cache. Columns that were handed
to a saver are never overwritten: a layer that would do so moves to new buffers first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from engine_adapter.loader import LayerBuffers
from engine_adapter.quantised import Scheme, check_packable
from engine_adapter.refusal import Refused
from engine_adapter.tensors import KVTensors
from kvstore.errors import InvalidRequest
from kvstore.types import ByteArray

GROW_FACTOR = 2
CPU = torch.device("cpu")
MakeEmpty: TypeAlias = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""An uninitialised buffer of a shape, like a tensor in all else."""


class LayerLoad(Protocol):
    """A load that is on its way."""

    def wait(self, layer: int) -> None:
        """Until `layer` lies in its buffers. Raises LoadFailed."""


@dataclass(frozen=True)
class ModelShape:
    """What one forward pass of the model showed. `windows`: a layer, None is full attention."""

    windows: tuple[int | None, ...]
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device = CPU

    def tensors(self, block_tokens: int, scheme: Scheme | None = None) -> KVTensors:
        """The same in bytes. Raises InvalidRequest for what cannot be kept by this `scheme`."""
        size = self.dtype.itemsize
        if scheme is not None:
            dtype = str(self.dtype).removeprefix("torch.")
            check_packable(dtype, scheme, block_tokens, self.key_size)
            if self.key_size != self.value_size:
                raise InvalidRequest(f"{scheme}: keys and values of different sizes")
        return KVTensors(
            len(self.windows),
            self.heads,
            self.key_size * size,
            self.value_size * size,
            block_tokens,
            scheme,
        )

    def shows(self, layer: KVLayer) -> bool:
        """Whether a used layer has this shape."""
        return layer.shape == (self.heads, self.key_size, self.value_size, self.dtype)


class KVLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [batch, heads, capacity, size]; columns [0, tokens) are in use.

    `window` None is full attention. Not thread-safe, but for the load that fills columns below
    `tokens` before the first `update`."""

    is_compileable = False
    is_croppable = True

    def __init__(
        self, window: int | None, capacity: int, empty: MakeEmpty = torch.Tensor.new_empty
    ) -> None:
        self.window = window
        self._empty = empty
        self.is_sliding = window is not None
        self.is_initialized = False
        self.tokens = 0
        self._capacity = capacity
        self._first = 0
        """Columns before it were not restored."""
        self._shared = 0
        """Columns before it belong to savers too."""
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._load: tuple[LayerLoad, int] | None = None

    # ------------------------------------------------------------------ what transformers calls

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, tokens, key_size = key_states.shape
        self._capacity = max(self._capacity, tokens)
        columns = self._capacity
        self._keys = self._empty(key_states, (batch, heads, columns, key_size))
        heads, value_size = value_states.shape[1], value_states.shape[3]
        self._values = self._empty(value_states, (batch, heads, columns, value_size))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; keys and values that these queries may see. Raises LoadFailed for a prefix that
        did not come."""
        if self._load is not None:
            load, layer = self._load
            load.wait(layer)
            self._load = None
        if self._keys is None or self._values is None:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._room_for(key_states, value_states)
        start, stop = self.tokens, self.tokens + key_states.shape[-2]
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.tokens = stop
        low = self._low(start)
        return keys[:, :, low:stop], values[:, :, low:stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        low = self._low(self.tokens)
        return self.tokens - low + query_length, low

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self._keys is None else self._keys.shape[0]

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, heads, tokens, size]; before a window they may never have been restored."""
        return None if self._keys is None else self._keys[:, :, : self.tokens]

    @property
    def values(self) -> torch.Tensor | None:
        return None if self._values is None else self._values[:, :, : self.tokens]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the count may carry either sign, as in several releases."""
        kept = self.tokens - abs(tokens_to_remove)
        if kept < 0 or self._first > self._low(kept):
            raise RuntimeError(
                f"crop to {kept} tokens: this layer was restored from token {self._first} on"
            )
        self.tokens = kept

    def reset(self) -> None:
        self._keys = self._values = self._load = None
        self.is_initialized = False
        self.tokens = self._first = self._shared = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._keys is not None:
            self._select(torch.arange(self._keys.shape[0]).repeat_interleave(repeats))

    # ------------------------------------------------------------------ buffers

    def _low(self, tokens: int) -> int:
        """First column that a query at position `tokens` may see."""
        return 0 if self.window is None else max(tokens - self.window + 1, 0)

    def _room_for(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers into which these states fit; checks that they are what the buffers were made
        for."""
        assert self._keys is not None  # update made them
        assert self._values is not None
        for held, new in ((self._keys, key_states), (self._values, value_states)):
            same = (held.shape[0], held.shape[1], held.shape[3], held.dtype, held.device)
            if same != (new.shape[0], new.shape[1], new.shape[3], new.dtype, new.device):
                raise Refused(
                    f"this cache holds {tuple(held.shape)} {held.dtype} on {held.device}, the "
                    f"model made {tuple(new.shape)} {new.dtype} on {new.device}; start without it"
                )
        needed = self.tokens + key_states.shape[-2]
        if needed > self._capacity or self.tokens < self._shared:
            if needed > self._capacity:
                self._capacity = max(needed, GROW_FACTOR * self._capacity)
            self._select(slice(None))
        return self._keys, self._values

    def _select(self, rows: torch.Tensor | slice) -> None:
        """Move to new buffers with these rows of the batch; the old ones stay as they are."""
        if self._keys is None or self._values is None:
            return
        keys, values = self._keys[rows, :, : self.tokens], self._values[rows, :, : self.tokens]
        self._keys = self._empty(keys, (*keys.shape[:2], self._capacity, keys.shape[3]))
        self._values = self._empty(values, (*values.shape[:2], self._capacity, values.shape[3]))
        self._keys[:, :, : self.tokens] = keys
        self._values[:, :, : self.tokens] = values
        self._shared = 0

    @property
    def shape(self) -> tuple[int, int, int, torch.dtype] | None:
        """Heads, key size, value size, dtype; None before the first use or when K and V differ in
        heads or dtype."""
        if self._keys is None or self._values is None:
            return None
        if self._keys.shape[1] != self._values.shape[1] or self._keys.dtype != self._values.dtype:
            return None
        return (
            self._keys.shape[1],
            self._keys.shape[3],
            self._values.shape[3],
            self._keys.dtype,
        )

    def prepare(self, shape: ModelShape, batch: int, tokens: int, pads: Sequence[int]) -> None:
        """Empty buffers that a load will fill up to column `tokens`. Padding is zeroed: NaN in it
        would leak through masked weights."""
        self._capacity = max(self._capacity, tokens)
        self.lazy_initialization(
            *(
                torch.empty((batch, shape.heads, 0, size), dtype=shape.dtype, device=shape.device)
                for size in (shape.key_size, shape.value_size)
            )
        )
        assert self._keys is not None  # just made
        assert self._values is not None
        for row, pad in enumerate(pads):
            self._keys[row, :, : min(pad, tokens)] = 0
            self._values[row, :, : min(pad, tokens)] = 0
        self.tokens = tokens
        self._first = self._low(tokens)

    def await_load(self, load: LayerLoad, index: int) -> None:
        """The next update waits for layer `index` of `load`."""
        self._load = (load, index)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole capacity, for a load or a saver."""
        assert self._keys is not None  # called after prepare or a forward pass
        assert self._values is not None
        return self._keys, self._values

    def buffers(self) -> LayerBuffers:
        """Byte views of the same, in host memory."""
        keys, values = self.whole()
        return LayerBuffers(_bytes(keys), _bytes(values), self._first)

    def share(self) -> None:
        """All columns in use now belong to savers too."""
        self._shared = self.tokens


def _bytes(tensor: torch.Tensor) -> ByteArray:
    view: ByteArray = tensor.detach().view(torch.uint8).numpy()
    return view


class KVCache(Cache):  # type: ignore[misc]
    """One request's layers. `chunk` 0, or the length of prefill chunks that count as exact."""

    def __init__(
        self,
        windows: Sequence[int | None],
        capacity: int,
        chunk: int = 0,
        empty: MakeEmpty = torch.Tensor.new_empty,
    ) -> None:
        self._windows = tuple(windows)
        self._empty = empty
        self._capacity = capacity
        self._chunk = chunk
        self.exact_tokens = 0
        """Leading tokens that were computed in whole chunks of `chunk`, or restored as such."""
        self.saved_blocks: list[int] = []
        """A sequence: leading blocks that are stored, or were handed to a saver."""
        self.namespace = b""
        self.fed_max = 0
        """Until the prefill is confirmed, no more tokens than this may be in the cache; 0: any."""
        self.session: Any = None
        super().__init__(layers=self._new_layers())

    def _new_layers(self) -> list[KVLayer]:
        return [KVLayer(window, self._capacity, self._empty) for window in self._windows]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == 0:
            self._note(key_states.shape[-2])
        states: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return states

    def _note(self, count: int) -> None:
        tokens = self.layers[0].tokens
        if self.fed_max and tokens + count > self.fed_max:
            raise Refused(
                f"{count} tokens were fed after a restored prefix of {tokens}, of "
                f"{self.fed_max} in all: this mode of generate repeats the prompt"
            )
        if self.exact_tokens == tokens and count == self._chunk:
            self.exact_tokens += count

    def restore(
        self, shape: ModelShape, batch: int, tokens: int, pads: Sequence[int], room: int = 0
    ) -> None:
        """Start anew with `tokens` columns that a load is about to fill, which may touch up to
        `room`: `buffers` and `whole` say where."""
        self._capacity = max(self._capacity, room)
        self.restart()
        for layer in self.layers:
            layer.prepare(shape, batch, tokens, pads)
        self.exact_tokens = tokens if self._chunk and tokens % self._chunk == 0 else 0

    def whole(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, all columns."""
        return [layer.whole() for layer in self.layers]

    def buffers(self) -> list[LayerBuffers]:
        """Byte views of the same, in host memory."""
        return [layer.buffers() for layer in self.layers]

    def await_load(self, load: LayerLoad) -> None:
        for index, layer in enumerate(self.layers):
            layer.await_load(load, index)

    def move_to(self, tokens: int) -> None:
        """The next tokens go to columns from `tokens` on: for what is computed before a prefix that
        lies behind it."""
        for layer in self.layers:
            layer.tokens = tokens

    def restart(self) -> None:
        """Empty, in new buffers: a late copy into the old ones harms nobody."""
        self.layers = self._new_layers()
        self.exact_tokens = 0

    def share(self) -> None:
        """All that is in use now belongs to savers too: it is not overwritten any more."""
        for layer in self.layers:
            layer.share()
