#!/usr/bin/env bash
# PPO with a critic on text; a reward model is the only reward. The critic starts from MODEL. Variables and arguments:
# README.md.
set -euo pipefail

# models and data
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-Skywork/Skywork-Reward-V2-Qwen3-0.6B}
DATA=${DATA:-trl-lib/ultrafeedback-prompt}
SAVE=${SAVE:-runs/ppo}

# batches (TBS counts samples per optimizer step, RBS prompts per rollout), lengths in tokens
TBS=${TBS:-128}
RBS=${RBS:-128}
N_SAMPLES=${N_SAMPLES:-1}
MICRO_TRAIN=${MICRO_TRAIN:-4}
MICRO_ROLLOUT=${MICRO_ROLLOUT:-$MICRO_TRAIN}
EPISODES=${EPISODES:-1}
PROMPT_MAX_LEN=${PROMPT_MAX_LEN:-1024}
GENERATE_MAX_LEN=${GENERATE_MAX_LEN:-1024}

# learning
LR=${LR:-1e-6}
CRITIC_LR=${CRITIC_LR:-9e-6}
L2=${L2:-0}
KL=${KL:-0.01}
KL_ESTIMATOR=${KL_ESTIMATOR:-k1}
SEED=${SEED:-42}
EVAL_STEPS=${EVAL_STEPS:-20}
SAVE_STEPS=${SAVE_STEPS:-20}

source "$(dirname "$0")/../launch.sh" # ENGINE, NPROC, PYTHON ...
TRAIN_DATA=$DATA
EVAL_DATA=${EVAL_DATA:-$(held_out "$DATA")}
train lightrft.cli.train --reward_pretrain "$REWARD_MODEL" \
  --advantage_estimator gae --advantages_norm --critic_learning_rate "$CRITIC_LR" "$@"
