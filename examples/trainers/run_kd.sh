#!/usr/bin/env bash
# Distillation of TEACHER into MODEL, on chats; both have the same tokens. Variables and arguments: README.md.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
TEACHER=${TEACHER:-Qwen/Qwen2.5-1.5B-Instruct}
DATA=${DATA:-trl-lib/Capybara}
SAVE=${SAVE:-runs/kd}
LR=${LR:-1e-5}
KD_COEF=${KD_COEF:-0.4}

source "$(dirname "$0")/fixed_data.sh" # TBS, EPOCHS, NPROC ...
fit lightrft.cli.train_kd --teacher_model "$TEACHER" --kd_coef "$KD_COEF" "$@"
