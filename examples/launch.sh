# Sourced by the scripts of reinforcement learning: the rollout engine, and `train PROGRAM FLAGS...`, which starts the
# ranks with the variables of those scripts as flags.
source "$(dirname "${BASH_SOURCE[0]}")/torchrun.sh" # NNODES, NPROC, PYTHON ...
source "$(dirname "${BASH_SOURCE[0]}")/data.sh"     # split_of

# The default of ENGINE: vLLM where it is installed.
installed_engine() {
  if "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
    echo "rollout engine: vllm, which is installed; ENGINE=hf for the built-in one" >&2
    echo vllm
  else
    echo "rollout engine: hf, the built-in one; vLLM is not installed" >&2
    echo hf
  fi
}

ENGINE=${ENGINE:-$(installed_engine)}

# The flags of the data, without those that a script is called with: `data_flags ARGUMENTS`.
data_flags() {
  DATA_FLAGS=()
  [[ " $*" == *" --prompt_data"[\ =]* ]] || DATA_FLAGS+=(--prompt_data "${TRAIN_DATA:-$(split_of "$DATA" train)}")
  [[ " $*" == *" --eval_data"[\ =]* ]] || DATA_FLAGS+=(--eval_data "${EVAL_DATA:-$(split_of "$DATA" test)}")
}

# Every run script sets these variables; its own FLAGS follow, and win. Without TRAIN_DATA and EVAL_DATA the folder DATA
# has the rows of both splits.
train() {
  data_flags "$@"
  launch "$1" \
    --pretrain "$MODEL" --save_path "$SAVE" ${DATA_FLAGS[@]+"${DATA_FLAGS[@]}"} \
    --train_batch_size "$TBS" --rollout_batch_size "$RBS" --n_samples_per_prompt "$N_SAMPLES" \
    --micro_train_batch_size "$MICRO_TRAIN" --micro_rollout_batch_size "$MICRO_ROLLOUT" \
    --num_episodes "$EPISODES" --prompt_max_len "$PROMPT_MAX_LEN" --generate_max_len "$GENERATE_MAX_LEN" \
    --init_kl_coef "$KL" --kl_estimator "$KL_ESTIMATOR" --actor_learning_rate "$LR" --l2 "$L2" \
    --engine_type "$ENGINE" --seed "$SEED" --eval_steps "$EVAL_STEPS" --save_steps "$SAVE_STEPS" \
    --save_trajectories --use_tensorboard --fsdp --bf16 --gradient_checkpointing "${@:2}"
}
