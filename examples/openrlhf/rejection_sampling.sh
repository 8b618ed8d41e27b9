#!/usr/bin/env bash
# Rejection sampling (RAFT) in the commands of OpenRLHF: answers, their rewards, supervised fine-tuning on the best answer
# to each prompt; then again with the model that this has trained. Run it again to resume with the next iteration.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-checkpoint/llama-3-8b-rejection}
source examples/openrlhf/variables.sh

iter=$(cat "$OUT/iter.log" 2>/dev/null || echo 0)
while ((iter < ${TRAINING_ITERS:-10})); do
  model=$(newest "$iter")
  generate "$model" --temperature 0.9 --best_of_n "${N:-4}" --micro_batch_size 64 --iter "$iter"
  score "$OUT/generate.jsonl" "$OUT/rm.jsonl" --post_processor rs
  train train_sft "$model" "$OUT/checkpoint" --input_template "" --input_key input --output_key output --zero_stage 2 \
    --learning_rate "${LR:-2e-6}"
  echo $((++iter)) > "$OUT/iter.log"
done
