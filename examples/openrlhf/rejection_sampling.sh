#!/usr/bin/env bash
# Rejection sampling (RAFT) in the commands of OpenRLHF: answers, their rewards, supervised fine-tuning on the best answer
# to each prompt; then again with the model that this has trained. Run it again to resume with the next iteration.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-checkpoint/llama-3-8b-rejection}
source examples/openrlhf/variables.sh

iteration() {
  generate "$2" --temperature 0.9 --best_of_n "${N:-4}" --micro_batch_size 64 --iter "$1"
  score "$OUT/generate.jsonl" "$OUT/rm.jsonl" --post_processor rs
  train train_sft "$2" "$OUT/checkpoint" --input_template "" --input_key input --output_key output --zero_stage 2 \
    --learning_rate "${LR:-2e-6}"
}

iterate "${TRAINING_ITERS:-10}"
