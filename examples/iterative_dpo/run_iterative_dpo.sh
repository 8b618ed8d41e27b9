#!/usr/bin/env bash
# Iterative DPO: in every round the model answers prompts, the best and the worst of N_SAMPLES answers to each are a pair,
# and DPO learns from the pairs. The reference is the model that answered. Run it again to resume; see README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/iterative_dpo}
LR=${LR:-1e-4}
BETA=${BETA:-1}
source examples/rounds.sh
rounds iter_dpo dpo --beta "$BETA"
