"""Whether a torch model is still what it was: asked before every request, so it must be cheap.

Primitives:
  `Mark`           one tensor as it was
  `ModelWatch`     a model's modules, tensors and adapter states as they were
  `is_tuner`, `tuner_state`   adapter layers (LoRA and its kin), known by what they offer
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

WORDS = 32
WORD_BYTES = 8


class Mark:
    """The reference makes sure that it is this tensor: ids and memory are used again. The version
    counts writes in place. The sample shows writes that versions do not count, through `.data`, as
    when adapters are merged: enough of an edit that touches most of a tensor."""

    __slots__ = ("_address", "_is_counted", "_reference", "_sample", "_version", "_view")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = weakref.ref(tensor)
        self._address = tensor.data_ptr()
        self._is_counted = not tensor.is_inference()
        self._version = tensor._version if self._is_counted else 0
        self._view = _spread(tensor)
        self._sample = self._view.tobytes()

    def fits(self, tensor: Any) -> bool:
        """Whether `tensor` is the marked one, unchanged as far as can be seen."""
        is_same = self._reference() is tensor
        return (
            is_same
            and self._address == tensor.data_ptr()
            and (not self._is_counted or self._version == tensor._version)
            and self._view.tobytes() == self._sample
        )


def _spread(tensor: torch.Tensor) -> NDArray[Any]:
    """A view of a few words of its memory, spread evenly; empty where memory cannot be read."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return np.empty(0, np.uint8)
    flat: NDArray[Any] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    if flat.size <= WORDS * WORD_BYTES:
        return flat
    words = flat[: flat.size // WORD_BYTES * WORD_BYTES].view(np.uint64)
    return words[:: max(len(words) // WORDS, 1)]


class ModelWatch:
    """Made when the model is as it shall be; `is_unchanged` compares."""

    def __init__(self, model: Any) -> None:
        self._children: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._counts: list[tuple[dict[str, Any], int]] = []
        self._tensors: list[tuple[dict[str, Any], str, Mark]] = []
        self._tuners: list[tuple[Any, tuple[object, ...]]] = []
        todo = [model]
        while todo:
            module = todo.pop()
            children = tuple(module._modules.values())
            self._children.append((module._modules, children))
            for tensors in (module._parameters, module._buffers):
                self._counts.append((tensors, len(tensors)))
                self._tensors += [
                    (tensors, name, Mark(tensor))
                    for name, tensor in tensors.items()
                    if tensor is not None
                ]
            if is_tuner(module):
                self._tuners.append((module, tuner_state(module)))
            todo += [child for child in children if child is not None]

    def is_unchanged(self) -> bool:
        return (
            all(len(tensors) == count for tensors, count in self._counts)
            and all(tuple(held.values()) == children for held, children in self._children)
            and all(mark.fits(tensors.get(name)) for tensors, name, mark in self._tensors)
            and all(tuner_state(module) == state for module, state in self._tuners)
        )


def is_tuner(module: Any) -> bool:
    """An adapter layer: it knows active and merged adapters, and wraps the layer it changes."""
    return hasattr(type(module), "active_adapters") and "base_layer" in module._modules


def tuner_state(module: Any) -> tuple[object, ...]:
    return (
        tuple(module.active_adapters),
        bool(module.disable_adapters),
        tuple(module.merged_adapters),
        tuple(getattr(module, "scaling", {}).items()),
    )
