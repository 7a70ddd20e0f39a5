"""Policies by the name the configuration gives them. Primitives: `NAMES`, `make_policy`."""

from __future__ import annotations

from kvstore.catalog import Catalog
from kvstore.errors import ConfigError
from kvstore.policies.costs import BlockCosts
from kvstore.policies.named import Arc, Lfu, S3Fifo
from kvstore.policies.value import ValuePolicy
from kvstore.policies.wear import WearPrice
from kvstore.policy import LruLeaf, Policy

_PLAIN = {plain.name: plain for plain in (LruLeaf, Lfu, Arc, S3Fifo)}
NAMES = (ValuePolicy.name, *_PLAIN)


def make_policy(name: str, catalog: Catalog, costs: BlockCosts, wear: WearPrice) -> Policy:
    """The policy called `name`. Raises ConfigError."""
    if name == ValuePolicy.name:
        return ValuePolicy(catalog, costs, wear)
    if name not in _PLAIN:
        raise ConfigError(f"policy.name={name!r} does not exist; use one of {', '.join(NAMES)}")
    return _PLAIN[name](catalog)
