#!/usr/bin/env bash
# RAFT (rejection sampling): in every round the model answers prompts, the best of N_SAMPLES answers to each is kept, and
# supervised fine-tuning learns these. Run it again to resume; see README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/raft}
LR=${LR:-1e-3}
source examples/rounds.sh
rounds rs sft
