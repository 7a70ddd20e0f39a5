"""For a request: which stored blocks to load, which to recompute."""
