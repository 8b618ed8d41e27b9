#!/usr/bin/env bash
# Supervised fine-tuning on chats, or on prompts with their answers. Variables and arguments: README.md.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B}
DATA=${DATA:-trl-lib/Capybara}
SAVE=${SAVE:-runs/sft}
LR=${LR:-1e-5}

source "$(dirname "$0")/fixed_data.sh" # TBS, EPOCHS, NPROC ...
fit lightrft.cli.train_sft "$@"
