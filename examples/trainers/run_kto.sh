#!/usr/bin/env bash
# KTO on answers with a label, desirable or not. Variables and arguments: README.md.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-trl-lib/kto-mix-14k}
SAVE=${SAVE:-runs/kto}
LR=${LR:-5e-7}
BETA=${BETA:-0.1}

source "$(dirname "$0")/fixed_data.sh" # TBS, EPOCHS, NPROC ...
fit lightrft.cli.train_kto --beta "$BETA" "$@"
