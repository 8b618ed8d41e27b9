#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3.5-4B, whose layers have a state in three of four. Variables and arguments are those of
# run_grpo_gsm8k_qwen2.5_0.5b.sh. NPROC=1 trains on one GPU.
# Data first:  python examples/gsm8k_geo3k/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

# model and data
MODEL=${MODEL:-Qwen/Qwen3.5-4B}
DATA=${DATA:-$HOME/data/gsm8k}
SAVE=${SAVE:-runs/grpo_gsm8k_qwen3.5_4b}

# batches (TBS counts samples per optimizer step, RBS prompts per rollout), lengths in tokens
TBS=${TBS:-128}
RBS=${RBS:-128}
N_SAMPLES=${N_SAMPLES:-8}
MICRO_TRAIN=${MICRO_TRAIN:-4}
MICRO_ROLLOUT=${MICRO_ROLLOUT:-$MICRO_TRAIN}
EPISODES=${EPISODES:-30}
PROMPT_MAX_LEN=${PROMPT_MAX_LEN:-1024}
GENERATE_MAX_LEN=${GENERATE_MAX_LEN:-2048}

# learning
LR=${LR:-1e-6}
L2=${L2:-1e-2}
KL=${KL:-0.01}
KL_ESTIMATOR=${KL_ESTIMATOR:-k3}
SEED=${SEED:-42}
EVAL_STEPS=${EVAL_STEPS:-20}
SAVE_STEPS=${SAVE_STEPS:-20}

source "$(dirname "$0")/../launch.sh" # NNODES, NPROC, PYTHON ...
train "$(dirname "$0")/train_colocate.py" \
  --advantage_estimator group_norm --use_kl_loss --adam_offload --freeze_prefix visual "$@"
