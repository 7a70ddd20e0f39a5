"""Engines on kvstore. The core here knows arrays, not engines; one module for each engine.

  `engine_adapter.transformers`   Hugging Face: `attach(model)`, then `generate` as always

Core:
  `tensors`      how keys and values of a block lie in a slot
  `prefix`       where the stored prefix of a token sequence is found, if anywhere
  `loader`       slots into an engine's buffers, layer by layer; provisional until checked
  `saver`        buffers into slots, on a thread of its own, after the forward pass
  `statistics`   what happened and why, counted

Imports of `kvstore` are limited to its client, layout, fingerprint, types and errors. Nothing here
may make an engine wait beyond a stated deadline, or fail because the store did.
"""
