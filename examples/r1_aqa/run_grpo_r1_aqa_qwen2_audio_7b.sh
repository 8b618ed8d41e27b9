#!/usr/bin/env bash
# GRPO on AVQA with Qwen2-Audio-7B-Instruct, on one GPU. Variables and arguments are those of
# examples/gsm8k_geo3k/run_grpo_gsm8k_qwen2.5_0.5b.sh, and AUDIO, the folder of the sounds.
# Data first:  python examples/r1_aqa/data_preprocess/avqa.py --input_jsonl RAW --audio_dir "$AUDIO" --local_save_dir ~/data/avqa
set -euo pipefail

# model and data
MODEL=${MODEL:-Qwen/Qwen2-Audio-7B-Instruct}
DATA=${DATA:-$HOME/data/avqa}
AUDIO=${AUDIO:-$HOME/data/avqa/audio}
SAVE=${SAVE:-runs/grpo_r1_aqa_qwen2_audio_7b}

# batches (TBS counts samples per optimizer step, RBS prompts per rollout), lengths in tokens. Every micro-batch brings
# the weights from host memory, so there are few.
TBS=${TBS:-16}
RBS=${RBS:-4}
N_SAMPLES=${N_SAMPLES:-4}
MICRO_TRAIN=${MICRO_TRAIN:-8}
MICRO_ROLLOUT=${MICRO_ROLLOUT:-$MICRO_TRAIN}
EPISODES=${EPISODES:-10}
PROMPT_MAX_LEN=${PROMPT_MAX_LEN:-512}
GENERATE_MAX_LEN=${GENERATE_MAX_LEN:-1024}

# learning
LR=${LR:-1e-6}
L2=${L2:-1e-2}
KL=${KL:-0.01}
KL_ESTIMATOR=${KL_ESTIMATOR:-k3}
SEED=${SEED:-42}
EVAL_STEPS=${EVAL_STEPS:-20}
SAVE_STEPS=${SAVE_STEPS:-20}

GPUS_PER_NODE=${GPUS_PER_NODE:-1}
source "$(dirname "$0")/../launch.sh" # NNODES, NPROC, PYTHON ...
train "$(dirname "$0")/train_colocate.py" \
  --advantage_estimator group_norm --use_kl_loss --media_root "$AUDIO" --fsdp_cpu_offload "$@"
