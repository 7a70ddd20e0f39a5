"""What prefill and transfers cost on this machine, as far as it was seen.

Primitives:
  `PrefillCost`  seconds to compute tokens: a part a token, a part a token and its position
  `LinkCost`     seconds to bring bytes up from a tier
  `Fit`          seconds as a sum of non-negative terms, learnt from samples with outliers
  `Costs`        the current beliefs, of every namespace and tier; `snapshot` and `restore`

Pure: samples come as arguments, the newest count most, and nothing here reads a clock. A belief
starts from a guess, whose proportions hold until samples say otherwise; it changes in `refresh`
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvstore.types import FloatArray, NamespaceId, Tier

Quantity = TypeVar("Quantity", float, FloatArray)

SAMPLES_MAX = 48
SAMPLES_TO_TRUST = 3
"""Fewer are no calibration: until then nobody is advised against a load."""
PREFILL_FADE = 0.95
LINK_FADE = 0.85
"""What a sample's weight becomes with each newer one: half the weight lies on the newest four."""
FLOPS_PER_SECOND_GUESS = 4e14
CALL_TOKENS_GUESS = 64.0
"""A forward pass costs as much as so many more tokens, before anything was measured."""
_SECONDS_MIN = 1e-7
_ROUNDS = 8
_RIDGE = 1e-5
_RESIDUAL_USUAL = 0.05
NAMESPACES_KEPT_MAX = 256


@dataclass(frozen=True)
class PrefillCost:
    """Seconds to prefill tokens [start, end): linear and attention term."""

    seconds_per_token: float
    seconds_per_token_position: float

    def seconds(self, start_tokens: Quantity, end_tokens: Quantity) -> Quantity:
        """Of tokens [start, end); scalars or float arrays."""
        tokens = end_tokens - start_tokens
        positions = tokens * (end_tokens + start_tokens) * 0.5
        return tokens * self.seconds_per_token + positions * self.seconds_per_token_position


@dataclass(frozen=True)
class LinkCost:
    """Seconds to bring bytes up from a tier, its queue not counted."""

    latency_seconds: float
    seconds_per_byte: float
    decode_seconds_per_byte: float = 0.0
    """Of the codec; 0 where blocks are stored raw."""

    def seconds(self, count_bytes: Quantity) -> Quantity:
        """Of so many bytes moved together; scalar or float array."""
        each = self.seconds_per_byte + self.decode_seconds_per_byte
        return self.latency_seconds + count_bytes * each


LINKS_GUESSED = {
    Tier.HOST: LinkCost(2e-5, 1 / 2e10),
    Tier.NVME: LinkCost(2e-4, 1 / 3e9),
}


@dataclass(frozen=True)
class ModelSize:
    """What the work of a token depends on."""

    parameters: float
    layers: int
    hidden: int


MODEL_GUESSED = ModelSize(8e9, 32, 4096)


class Fit:
    """seconds = Σ coefficient · term, by least relative error over the newest samples.

    The guess gives proportions; its scale is the median of what was seen. From there each
    coefficient moves as far as samples near it pull. Nearly half of the weight may be outliers.
    """

    def __init__(self, guess: Iterable[float], fade: float) -> None:
        self.guess: FloatArray = np.array(list(guess), np.float64)
        self._fade = fade
        self._terms: list[tuple[float, ...]] = []
        self._seconds: list[float] = []
        self.coefficients: FloatArray = self.guess
        """float64, one a term, as of the last `refit`; the guess before it."""
        self.is_due = False
        """Samples came since the last `refit`."""
        self.error = 0.0
        """Median of |prediction ÷ seen − 1| over the samples kept."""

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, terms: tuple[float, ...], seconds: float) -> None:
        """One measurement; what is not finite or not positive is ignored."""
        if not (np.isfinite(seconds) and seconds > 0 and np.isfinite(terms).all()):
            return
        self._terms = [*self._terms, terms][-SAMPLES_MAX:]
        self._seconds = [*self._seconds, max(seconds, _SECONDS_MIN)][-SAMPLES_MAX:]
        self.is_due = True

    def refit(self) -> None:
        """Learn from the samples: about a millisecond."""
        self.is_due = False
        count = len(self._seconds)
        recency: FloatArray = np.power(self._fade, np.arange(count - 1.0, -1.0, -1.0))
        # Of each sample's seconds the share a term explains, if the guess were right.
        shares = np.array(self._terms) * self.guess / np.array(self._seconds)[:, None]
        scale = 1.0 / _weighted_median(shares.sum(axis=1), recency)
        shares *= scale
        factors = np.ones(len(self.guess))
        trust = np.ones(count)
        for _ in range(_ROUNDS):
            larger = np.maximum(shares @ factors, 1.0)
            factors = _least_squares(shares, recency * trust / larger**2)
            predicted = shares @ factors
            off = (predicted - 1.0) / np.maximum(predicted, 1.0)
            # What is far off counts for nothing, however far.
            trust = 1.0 / (off**2 + _RESIDUAL_USUAL**2)
        self.error = _weighted_median(np.abs(predicted - 1.0), recency)
        self.coefficients = self.guess * scale * factors

    def snapshot(self) -> list[list[float]]:
        """The samples, oldest first: terms, then seconds."""
        return [[*terms, s] for terms, s in zip(self._terms, self._seconds, strict=True)]

    def restore(self, samples: Iterable[Iterable[float]]) -> None:
        """Take samples of a snapshot. Raises ValueError, TypeError for what is none."""
        for sample in samples:
            *terms, seconds = (float(number) for number in sample)
            if len(terms) != len(self.guess):
                raise ValueError(f"a sample of {len(terms)} terms, {len(self.guess)} are known")
            self.add(tuple(terms), seconds)


def _least_squares(shares: FloatArray, weights: FloatArray) -> FloatArray:
    """Non-negative factors that bring `shares @ factors` near 1, drawn a little towards 1."""
    pull = _RIDGE * weights.sum()
    factors = np.zeros(shares.shape[1])
    used = np.ones(shares.shape[1], np.bool_)
    while used.any():
        own = shares[:, used]
        square = (own * weights[:, None]).T @ own + pull * np.eye(own.shape[1])
        factors[:] = 0.0
        factors[used] = np.linalg.solve(square, own.T @ weights + pull)
        if (factors >= 0).all():
            break
        used &= factors > 0
    return factors


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    order = values.argsort()
    reached = weights[order].cumsum()
    return float(values[order][reached.searchsorted(reached[-1] / 2)])


class Costs:
    """Beliefs of one daemon: kept by namespace id over restarts, asked by its number in this life.

    Numbers that were never declared are answered from the guess.
    """

    def __init__(self) -> None:
        self._prefill: dict[bytes, Fit] = {}
        self._names: dict[int, bytes] = {}
        self._restored: dict[str, Any] = {}
        self._links = {
            tier: Fit((guess.latency_seconds, guess.seconds_per_byte), LINK_FADE)
            for tier, guess in LINKS_GUESSED.items()
        }
        self.changes = 0
        """Counts samples: whoever keeps a copy sees when it is old."""

    # ------------------------------------------------------------------ asked

    @staticmethod
    def prefill_of_shape(
        parameters: float, layers: int, hidden: int, flops_per_second: float
    ) -> PrefillCost:
        """2 · parameters a token and 4 · layers · hidden a token and position, at that speed."""
        return PrefillCost(
            2.0 * parameters / flops_per_second, 4.0 * layers * hidden / flops_per_second
        )

    def prefill(self, namespace_index: int) -> PrefillCost:
        """Of one more token in a forward pass that is made anyway."""
        fit = self._prefill.get(self._names.get(namespace_index, b""))
        if fit is None:
            return _guess_of(MODEL_GUESSED)
        return PrefillCost(*fit.coefficients[1:].tolist())

    def call_seconds(self, namespace_index: int) -> float:
        """What a forward pass costs beside its tokens."""
        fit = self._prefill.get(self._names.get(namespace_index, b""))
        return 0.0 if fit is None else float(fit.coefficients[0])

    def is_calibrated(self, namespace_index: int) -> bool:
        """Whether prefill times of this namespace were seen, here or in an earlier life."""
        fit = self._prefill.get(self._names.get(namespace_index, b""))
        return fit is not None and len(fit) >= SAMPLES_TO_TRUST

    def link(self, tier: Tier) -> LinkCost:
        """Of bringing blocks up from `tier`: NVMe into host memory, host memory to the engine."""
        return LinkCost(*self._links[tier].coefficients.tolist())

    # ------------------------------------------------------------------ told

    def refresh(self) -> bool:
        """Learn from the samples of one belief that got some, about a millisecond; False when none
        did.
        """
        due = next((fit for fit in self._fits() if fit.is_due), None)
        if due is not None:
            due.refit()
        return due is not None

    def _fits(self) -> Iterable[Fit]:
        return (*self._links.values(), *self._prefill.values())

    def declare(
        self, namespace_index: int, namespace: NamespaceId, size: ModelSize | None = None
    ) -> None:
        """A number of this life and its id; the model's size, if the adapter knows it."""
        self._names[namespace_index] = namespace
        known = self._prefill.get(namespace)
        if known is None:
            known = self._prefill[namespace] = _prefill_fit(size or MODEL_GUESSED)
            kept = self._restored.pop(namespace.hex(), None)
            if kept is not None:
                known.restore(kept)
        elif size is not None:
            known.guess = _prefill_fit(size).guess

    def prefill_seen(
        self, namespace_index: int, start_tokens: int, end_tokens: int, seconds: float
    ) -> None:
        """One forward pass over tokens [start, end) took so long."""
        fit = self._prefill.get(self._names.get(namespace_index, b""))
        tokens = float(end_tokens - start_tokens)
        if fit is None or not 0 <= start_tokens < end_tokens:
            return
        fit.add((1.0, tokens, tokens * (start_tokens + end_tokens) * 0.5), seconds)
        self.changes += 1

    def link_seen(self, tier: Tier, count_bytes: int, seconds: float) -> None:
        """So many bytes came up from `tier` in one go."""
        fit = self._links.get(tier)
        if fit is not None and count_bytes > 0:
            fit.add((1.0, float(count_bytes)), seconds)
            self.changes += 1

    # ------------------------------------------------------------------ kept

    def snapshot(self) -> dict[str, Any]:
        """Plain data for `restore`; of namespaces not seen in this life too."""
        prefill = {name.hex(): fit.snapshot() for name, fit in self._prefill.items() if len(fit)}
        merged = {**self._restored, **prefill}
        return {
            "prefill": dict(list(merged.items())[-NAMESPACES_KEPT_MAX:]),
            "links": {tier.name: fit.snapshot() for tier, fit in self._links.items()},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Begin with an earlier life's samples. Raises ValueError, TypeError, KeyError,
        AttributeError for what is no snapshot; nothing is taken then.
        """
        trial = Costs()
        for samples in kept["prefill"].values():
            _prefill_fit(MODEL_GUESSED).restore(samples)
        for name, samples in kept["links"].items():
            trial._links[Tier[name]].restore(samples)
        self._restored = dict(kept["prefill"])
        self._links = trial._links

    def statistics(self) -> dict[str, object]:
        """Beliefs, and how far off the samples they still are."""
        return {
            "links": {
                tier.name.lower(): _described(fit, ("latency_seconds", "seconds_per_byte"))
                for tier, fit in self._links.items()
            },
            "prefill": {
                name.hex()[:16]: _described(
                    fit, ("seconds_per_call", "seconds_per_token", "seconds_per_token_position")
                )
                for name, fit in self._prefill.items()
            },
        }


def _guess_of(size: ModelSize) -> PrefillCost:
    return Costs.prefill_of_shape(size.parameters, size.layers, size.hidden, FLOPS_PER_SECOND_GUESS)


def _prefill_fit(size: ModelSize) -> Fit:
    """Terms: the call, its tokens, its tokens times their mean position."""
    guess = _guess_of(size)
    each = guess.seconds_per_token
    return Fit((CALL_TOKENS_GUESS * each, each, guess.seconds_per_token_position), PREFILL_FADE)


def _described(fit: Fit, names: tuple[str, ...]) -> dict[str, object]:
    found = zip(names, (float(f"{number:.4g}") for number in fit.coefficients), strict=True)
    return {**dict(found), "samples": len(fit), "relative_error": round(fit.error, 4)}
