#!/bin/bash
# Offline DPO of a tiny random model on a CPU.
# ODPO_TINY: a folder with the model (hf/) and preferences.jsonl, as tests/st/test_system.py makes it; more overrides may follow.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export HCCL_DETERMINISTIC=True

basepath=$(cd "$(dirname "$0")/../../.." && pwd)
: "${ODPO_TINY:?a folder with hf/ and preferences.jsonl}"

"${PYTHON:-python}" "$basepath/ray_gpt.py" --config-name=online_dpo_tiny \
    training.stage=ray_dpo \
    training.tokenizer_name_or_path="$ODPO_TINY/hf" \
    actor_rollout_ref.actor_rollout.load="$ODPO_TINY/hf" \
    actor_rollout_ref.ref.load="$ODPO_TINY/hf" \
    actor_rollout_ref.actor_rollout.data_path="$ODPO_TINY/preferences.jsonl" \
    "$@"
