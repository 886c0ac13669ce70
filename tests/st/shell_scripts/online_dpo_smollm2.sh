#!/bin/bash
# The quick start's command on the real SmolLM2-135M-Instruct, cut to three iterations (make model makes the weights).
export CUDA_DEVICE_MAX_CONNECTIONS=1
export HCCL_DETERMINISTIC=True

basepath=$(cd "$(dirname "$0")/../../.." && pwd)
cd "$basepath" || exit 1

"${PYTHON:-python}" ray_gpt.py --config-name=online_dpo_quickstart_smollm2 training.train_iters=3 "$@"
