# Sourced by the run scripts of the examples: where the ranks run, and `train SCRIPT FLAGS...`, which starts them with the
# variables of those scripts as flags.

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

# One node finds a free port; several: the same command on each, with its NODE_RANK and the address of node 0.
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NPROC=${NPROC:-$GPUS_PER_NODE}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-20090}
PYTHON=${PYTHON:-python3}
ENGINE=${ENGINE:-$(installed_engine)}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # seconds to save in, once asked to stop
export TOKENIZERS_PARALLELISM=false

# tee outlives SIGTERM and Ctrl-C, and torchrun takes the place of this shell, so that both reach it and the run can save
launch() {
  local nodes=(--standalone)
  if [[ "$NNODES" != 1 ]]; then
    nodes=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
  fi
  mkdir -p "$SAVE"
  exec > >(trap "" INT TERM; exec tee -a "$SAVE/log_node$NODE_RANK.txt") 2>&1
  exec "$PYTHON" -m torch.distributed.run "${nodes[@]}" --nproc-per-node "$NPROC" "$@"
}

# Every run script sets these variables; its own FLAGS follow, and win.
train() {
  launch "$1" \
    --pretrain "$MODEL" --prompt_data "$DATA/train.parquet" --eval_data "$DATA/test.parquet" --save_path "$SAVE" \
    --train_batch_size "$TBS" --rollout_batch_size "$RBS" --n_samples_per_prompt "$N_SAMPLES" \
    --micro_train_batch_size "$MICRO_TRAIN" --micro_rollout_batch_size "$MICRO_ROLLOUT" \
    --num_episodes "$EPISODES" --prompt_max_len "$PROMPT_MAX_LEN" --generate_max_len "$GENERATE_MAX_LEN" \
    --init_kl_coef "$KL" --kl_estimator "$KL_ESTIMATOR" --actor_learning_rate "$LR" --l2 "$L2" \
    --engine_type "$ENGINE" --seed "$SEED" --eval_steps "$EVAL_STEPS" --save_steps "$SAVE_STEPS" \
    --save_trajectories --use_tensorboard --fsdp --bf16 --gradient_checkpointing "${@:2}"
}
