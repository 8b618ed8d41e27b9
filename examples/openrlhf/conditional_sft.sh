#!/usr/bin/env bash
# Conditional SFT in the commands of OpenRLHF: rewards of answers that a data set has, supervised fine-tuning on prompts
# that end with the reward, then answers and their rewards when the model is asked for WISH.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-checkpoint/llama-3-8b-csft}
source examples/openrlhf/variables.sh
DATASET=${DATASET:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}

score "$DATASET" "$OUT/rm.jsonl" --input_key "${ANSWER_KEY:-chosen}" $TEMPLATE --max_samples 128000 --post_processor csft \
  --normalize_reward
train train_sft "$POLICY" "$OUT/checkpoint" --zero_stage 2 --learning_rate "${LR:-5e-6}"
generate "$OUT/checkpoint" --iter 0 --enable_csft --csft_prompt "<rm_score>: ${WISH:-5.00}"
score "$OUT/generate.jsonl" "$OUT/wished.jsonl"
