#!/usr/bin/env bash
# Conditional SFT: in every round the model answers prompts, and supervised fine-tuning learns every answer under a prompt
# that ends with its reward. From then on the model is asked for the reward WISH. Run it again to resume; see README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/conditional_sft}
LR=${LR:-1e-3}
WISH=${WISH:-1.00}
TRAINED="--enable_csft --csft_prompt '<rm_score>: $WISH'"
source examples/rounds.sh
rounds csft sft
