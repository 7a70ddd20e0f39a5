#!/usr/bin/env bash
# An OpenAI-compatible server whose prefixes outlive it. Usage: examples/vllm_serve.sh MODEL [vllm options]
set -euo pipefail

kvstore serve &
trap 'kill %1' EXIT

# As `vllm serve`; the package for CPUs has no such command.
python -m vllm.entrypoints.openai.api_server --model "$@" --kv-transfer-config '{
  "kv_connector": "KVStoreConnector",
  "kv_connector_module_path": "engine_adapter.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute"
}'
