"""The policies an operator can name; the judgement every one of them gives is `policy.Policy`.

Primitive: `make_policy`.
"""

from __future__ import annotations

from kvstore.policies.factory import NAMES, make_policy

__all__ = ["NAMES", "make_policy"]
