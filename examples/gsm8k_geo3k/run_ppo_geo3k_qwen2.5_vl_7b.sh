#!/usr/bin/env bash
# PPO with a critic on Geometry3K with Qwen2.5-VL-7B-Instruct; the critic starts from the same model. Variables and
# arguments are those of run_grpo_gsm8k_qwen2.5_0.5b.sh, and CRITIC_LR.
# Data first:  python examples/gsm8k_geo3k/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
set -euo pipefail

# model and data
MODEL=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}
DATA=${DATA:-$HOME/data/geo3k}
SAVE=${SAVE:-runs/ppo_geo3k_qwen2.5_vl_7b}

# batches (TBS counts samples per optimizer step, RBS prompts per rollout), lengths in tokens
TBS=${TBS:-128}
RBS=${RBS:-128}
N_SAMPLES=${N_SAMPLES:-2}
MICRO_TRAIN=${MICRO_TRAIN:-4}
MICRO_ROLLOUT=${MICRO_ROLLOUT:-$MICRO_TRAIN}
EPISODES=${EPISODES:-30}
PROMPT_MAX_LEN=${PROMPT_MAX_LEN:-1024}
GENERATE_MAX_LEN=${GENERATE_MAX_LEN:-2048}

# learning
LR=${LR:-1e-6}
CRITIC_LR=${CRITIC_LR:-9e-6}
L2=${L2:-1e-2}
KL=${KL:-0.01}
KL_ESTIMATOR=${KL_ESTIMATOR:-k1}
SEED=${SEED:-42}
EVAL_STEPS=${EVAL_STEPS:-20}
SAVE_STEPS=${SAVE_STEPS:-20}

source "$(dirname "$0")/../launch.sh" # NNODES, NPROC, PYTHON ...
train "$(dirname "$0")/train_colocate.py" \
  --advantage_estimator gae --advantages_norm --critic_learning_rate "$CRITIC_LR" \
  --limit_mm_image_per_prompt 10 --fsdp_cpu_offload "$@"
