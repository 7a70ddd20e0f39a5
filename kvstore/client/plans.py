"""Plans as they travel: what a client says with its match, and what comes back.

Primitives: `Asking`, `packed_size`, `unpack_plan`, `load_order`. Pure translation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.costs import ModelSize, PrefillCost
from kvstore.hints import Hint
from kvstore.planner import Ability, Plan
from kvstore.rpc import control_pb2 as pb


@dataclass(frozen=True)
class Asking:
    """What goes with a match."""

    ability: Ability | None = None
    hints: tuple[Hint, ...] = ()
    begin_load: bool = False
    """The caller iterates `load()` at once; the daemon need not wait for that call."""

    @property
    def packed_ability(self) -> pb.Ability | None:
        """None asks for no plan."""
        can = self.ability
        if can is None:
            return None
        return pb.Ability(
            prompt_tokens=can.prompt_tokens,
            held_blocks=can.held_blocks,
            stages=can.stages,
            unit_blocks=can.unit_blocks,
        )

    @property
    def packed_hints(self) -> list[pb.Hint]:
        """Those that say something."""
        return [
            pb.Hint(
                hint_class=hint.hint_class,
                start_tokens=hint.start_tokens,
                end_tokens=hint.end_tokens,
            )
            for hint in self.hints
            if hint.hint_class
        ]


def packed_size(model: ModelSize | None) -> pb.ModelSize | None:
    """None says nothing."""
    if model is None:
        return None
    return pb.ModelSize(parameters=model.parameters, layers=model.layers, hidden=model.hidden)


def unpack_plan(found: Any) -> Plan:
    """From the daemon's message."""
    return Plan(
        found.first,
        found.last,
        found.from_back,
        found.ttft_seconds,
        found.recompute_seconds,
        found.begin_seconds,
        found.load_seconds,
        found.saved_seconds,
        found.in_layers,
        PrefillCost(found.seconds_per_token, found.seconds_per_token_position),
        found.seconds_per_call,
    )


def load_order(made: Plan | None, layer_order: bool) -> tuple[pb.LoadOrder, int]:
    """Order and first block of a load: the plan's, else as wished and from the start."""
    if made is None:
        return (pb.LAYER_ORDER if layer_order else pb.BLOCK_ORDER), 0
    if made.from_back:
        return pb.BACK_ORDER, made.first
    return (pb.LAYER_ORDER if made.in_layers else pb.BLOCK_ORDER), made.first
