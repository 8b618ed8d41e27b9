#!/usr/bin/env bash
# A process reward model, on solutions with a label for every step. PLACEHOLDER is one token of MODEL that no step holds.
# Variables and arguments: README.md.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-trl-lib/math_shepherd}
SAVE=${SAVE:-runs/prm}
LR=${LR:-1e-6}
PLACEHOLDER=${PLACEHOLDER:-<|fim_pad|>}

source "$(dirname "$0")/fixed_data.sh" # TBS, EPOCHS, NPROC ...
fit lightrft.cli.train_prm --placeholder_token "$PLACEHOLDER" --reward_tokens + - --step_policy skip "$@"
