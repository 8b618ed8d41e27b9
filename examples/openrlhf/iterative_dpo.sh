#!/usr/bin/env bash
# Iterative DPO in the commands of OpenRLHF: answers, pairs of the best and the worst answer to each prompt, DPO on the
# pairs; then again with the model that this has trained. Run it again to resume with the next iteration.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-checkpoint/llama-3-8b-iter-dpo}
source examples/openrlhf/variables.sh

iteration() {
  generate "$2" --temperature 1.0 --best_of_n "${N:-16}" --max_num_seqs 64 --iter "$1"
  score "$OUT/generate.jsonl" "$OUT/rm.jsonl" --post_processor iter_dpo ${MIN_REWARD_GAP:+--min_reward_gap "$MIN_REWARD_GAP"}
  train train_dpo "$2" "$OUT/checkpoint" --prompt_key prompt --ref_pretrain "$POLICY" --zero_stage 3 \
    --learning_rate "${LR:-5e-7}"
}

iterate "${TRAINING_ITERS:-5}"
