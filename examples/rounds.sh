# Sourced by the scripts of raft, iterative_dpo and conditional_sft: their variables, and `rounds POST_PROCESSOR TRAINER
# FLAGS...`, which runs examples/rounds.py with them. Without MODEL the rounds start from the careless teacher of the
# quickstart, which is made in OUT, and take its additions.
MODEL=${MODEL:-}
ROUNDS=${ROUNDS:-2}
PROMPTS=${PROMPTS:-1000}
N_SAMPLES=${N_SAMPLES:-8}
SCORE=${SCORE:-exact}
TBS=${TBS:-32}
EPOCHS=${EPOCHS:-1}
PROMPT_MAX_LEN=${PROMPT_MAX_LEN:-64}
GENERATE_MAX_LEN=${GENERATE_MAX_LEN:-48}
SAVE_STEPS=${SAVE_STEPS:-50}
ENGINE=${ENGINE:-hf}
NPROC=${NPROC:-1}
SEED=${SEED:-42}
PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

rounds() {
  source examples/quickstart/teacher.sh
  source examples/data.sh
  if [[ ! "$MODEL" ]]; then careless_teacher; fi
  local lengths="--prompt_max_len $PROMPT_MAX_LEN --generate_max_len $GENERATE_MAX_LEN --engine_type $ENGINE --seed $SEED"
  exec "$PYTHON" examples/rounds.py --model "${MODEL:-$OUT/sft/hf}" --out "$OUT" --rounds "$ROUNDS" \
    --prompts "$PROMPTS" --nproc "$NPROC" --trained "${TRAINED:-}" \
    --generate "--prompt_data '$(split_of "${DATA:-$OUT/data}" train)' --best_of_n $N_SAMPLES --score '$SCORE' \
      --post_processor $1 $lengths ${GENERATE_ARGS:-}" \
    --train "$2 --train_batch_size $TBS --max_epochs $EPOCHS --learning_rate $LR \
      --max_len $((PROMPT_MAX_LEN + GENERATE_MAX_LEN)) --seed $SEED --save_steps $SAVE_STEPS --max_ckpt_num 1 \
      ${*:3} ${TRAIN_ARGS:-}" \
    --evaluate "--eval_data '${DATA:-$OUT/data}/test.parquet' --score '$SCORE' $lengths ${EVAL_ARGS:-}"
}
