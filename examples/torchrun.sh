# Sourced by the run scripts of the examples: where the ranks run, and `launch PROGRAM FLAGS...`, which starts them. PROGRAM
# is a file or a module of lightrft.

# One node finds a free port; several: the same command on each, with its NODE_RANK and the address of node 0.
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NPROC=${NPROC:-$GPUS_PER_NODE}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-20090}
PYTHON=${PYTHON:-python3}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # seconds to save in, once asked to stop
export TOKENIZERS_PARALLELISM=false

# tee outlives SIGTERM and Ctrl-C, and torchrun takes the place of this shell, so that both reach it and the run can save
launch() {
  local nodes=(--standalone) program=("$1")
  if [[ "$1" == lightrft.* ]]; then program=(-m "$1"); fi
  if [[ "$NNODES" != 1 ]]; then
    nodes=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
  fi
  mkdir -p "$SAVE"
  exec > >(trap "" INT TERM; exec tee -a "$SAVE/log_node$NODE_RANK.txt") 2>&1
  exec "$PYTHON" -m torch.distributed.run "${nodes[@]}" --nproc-per-node "$NPROC" "${program[@]}" "${@:2}"
}

# Print what to evaluate on where EVAL_DATA is not set: DATA, of which the split `test` is read. A file has no splits.
held_out() {
  if [[ -f "$1" ]]; then echo none; else echo "$1"; fi
}
