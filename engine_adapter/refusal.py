"""What an adapter will not do, by name. Primitive: `Refused`."""

from __future__ import annotations

from kvstore.errors import InvalidRequest


class Refused(InvalidRequest):
    """A model or a mode whose results could be silently wrong with a stored prefix; says the way
    out."""
