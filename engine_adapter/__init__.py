"""Engines on kvstore. The core here knows arrays, not engines; one module for each engine.

  `engine_adapter.transformers`   Hugging Face: `attach(model)`, then `generate` as always
  `engine_adapter.vllm`           vLLM: a connector named in `--kv-transfer-config`
  `engine_adapter.vllm_tier`      vLLM: a tier below its own offloading

vLLM's connector, without vLLM (`vllm` itself only hands on):
  `vllm_scheduler`, `vllm_lookup`, `vllm_requests`   what to load, and when to say no
  `vllm_saves`                                       what to save
  `vllm_worker`, `vllm_mover`                        blocks between the engine and the store
  `vllm_host`, `vllm_device`                         in memory; on a GPU, by the transfer engine
  `vllm_blocks`, `vllm_target`, `vllm_hold`          where blocks lie; who keeps them meanwhile
  `vllm_orders`                                      what the halves say
  `vllm_identity`, `vllm_settings`, `vllm_speed`, `vllm_statistics`

Core:
  `tensors`      how keys and values of a block lie in a slot
  `prefix`       where the stored prefix of a token sequence is found, if anywhere
  `loader`       slots into an engine's buffers, layer by layer; provisional until checked
  `saver`        buffers into slots, on a thread of its own, after the forward pass
  `statistics`   what happened and why, counted

Imports of `kvstore` are limited to its client, layout, fingerprint, types and errors. Nothing here
may make an engine wait beyond a stated deadline, or fail because the store did.
"""
