"""Test kit for this package and for those who build on it."""

from kvstore.testing.clock import VirtualClock

__all__ = ["VirtualClock"]
