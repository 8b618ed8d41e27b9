#!/usr/bin/env bash
# GRPO of a judge that sees, on pairs with a known better candidate. Variables and arguments are those of
# examples/gsm8k_geo3k/run_grpo_gsm8k_qwen2.5_0.5b.sh, and MEDIA, the folder of pictures and videos that rows name.
# Data first:  python examples/grm_vl_rl/data_preprocess/pairs.py --pairs pairs.jsonl --local_save_dir ~/data/grm
set -euo pipefail

# model and data
MODEL=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}
DATA=${DATA:-$HOME/data/grm}
MEDIA=${MEDIA:-$DATA}
SAVE=${SAVE:-runs/grm_vl_rl}

# batches (TBS counts samples per optimizer step, RBS prompts per rollout), lengths in tokens
TBS=${TBS:-64}
RBS=${RBS:-32}
N_SAMPLES=${N_SAMPLES:-8}
MICRO_TRAIN=${MICRO_TRAIN:-8}
MICRO_ROLLOUT=${MICRO_ROLLOUT:-$MICRO_TRAIN}
EPISODES=${EPISODES:-2}
PROMPT_MAX_LEN=${PROMPT_MAX_LEN:-12288}
GENERATE_MAX_LEN=${GENERATE_MAX_LEN:-4096}

# learning
LR=${LR:-1e-6}
L2=${L2:-1e-2}
KL=${KL:-0.001}
KL_ESTIMATOR=${KL_ESTIMATOR:-k3}
SEED=${SEED:-42}
EVAL_STEPS=${EVAL_STEPS:-20}
SAVE_STEPS=${SAVE_STEPS:-20}

source "$(dirname "$0")/../launch.sh" # NNODES, NPROC, PYTHON ...
engine=()
if [[ "$ENGINE" != hf ]]; then engine=(--engine_mem_util "${MEM_UTIL:-0.8}"); fi
train "$(dirname "$0")/train_colocate.py" \
  --advantage_estimator group_norm --use_kl_loss --media_root "$MEDIA" --adam_offload "${engine[@]}" "$@"
