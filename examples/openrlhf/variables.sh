# Sourced by the scripts of this folder: the variables of their commands, with the values that OpenRLHF's manual prints.
POLICY=${POLICY:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-mixture}
PROMPTS=${PROMPTS:-OpenRLHF/prompt-collection-v0.1}
EVAL_TASK=${EVAL_TASK:-generate_vllm}
TEMPLATE=${TEMPLATE---apply_chat_template}
MAX_LEN=${MAX_LEN:-2048}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-2048}
ROLLOUT_BATCH_SIZE=${ROLLOUT_BATCH_SIZE:-10240}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
EPOCHS=${EPOCHS:-1}
TP_SIZE=${TP_SIZE:-4}
PYTHON=${PYTHON:-python3}
LAUNCH=${LAUNCH:-deepspeed --module}
export TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"

# generate PRETRAIN FLAGS...: answers of a model to prompts, in OUT/generate.jsonl
generate() {
  "$PYTHON" -m lightrft.cli.batch_inference --eval_task "$EVAL_TASK" --pretrain "$1" --bf16 \
    --max_new_tokens "$MAX_NEW_TOKENS" --prompt_max_len "$MAX_LEN" --dataset "$PROMPTS" \
    --input_key "${INPUT_KEY:-context_messages}" $TEMPLATE --enable_prefix_caching --tp_size "$TP_SIZE" \
    --rollout_batch_size "$ROLLOUT_BATCH_SIZE" --output_path "$OUT/generate.jsonl" "${@:2}" ${GENERATE_ARGS:-}
}

# score DATASET OUTPUT FLAGS...: the reward model reads answers; their mean reward is added to OUT/rewards.jsonl
score() {
  $LAUNCH lightrft.cli.batch_inference --eval_task rm --pretrain "$REWARD_MODEL" --bf16 --max_len "$((2 * MAX_LEN))" \
    --dataset "$1" --dataset_probs 1.0 --zero_stage 0 --micro_batch_size 4 --output_path "$2" "${@:3}"
  tr -d '\n' < "$2.summary.json" >> "$OUT/rewards.jsonl"
  echo >> "$OUT/rewards.jsonl"
}

# train TRAINER PRETRAIN SAVE_PATH FLAGS...: one round of training on the rows that the reward model has left
train() {
  $LAUNCH "lightrft.cli.$1" --max_len "$((2 * MAX_LEN))" --dataset "$OUT/rm.jsonl" --dataset_probs 1.0 \
    --train_batch_size "$TRAIN_BATCH_SIZE" --micro_train_batch_size 2 --pretrain "$2" --save_path "$3" \
    --max_epochs "$EPOCHS" --bf16 --gradient_checkpointing "${@:4}" ${TRAIN_ARGS:-}
}

# iterate COUNT: run `iteration NUMBER MODEL` of the script for each that OUT/iter.log does not count as finished. MODEL is
# what the iteration before has trained; in the first one, the policy itself.
iterate() {
  local iter model=$POLICY
  iter=$(cat "$OUT/iter.log" 2>/dev/null || echo 0)
  while ((iter < $1)); do
    if ((iter > 0)); then model=$OUT/checkpoint; fi
    iteration "$iter" "$model"
    echo $((++iter)) > "$OUT/iter.log"
  done
}
