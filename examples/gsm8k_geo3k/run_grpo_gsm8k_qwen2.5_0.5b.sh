#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B-Instruct. Every variable can be set in the environment; every argument is passed to
# the trainer and overrides the flags below, e.g.  KL=0.001 run_grpo_gsm8k_qwen2.5_0.5b.sh --max_steps 10 --use_wandb
# Data first:  python examples/gsm8k_geo3k/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
set -euo pipefail

# model and data
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
SAVE=${SAVE:-runs/grpo_gsm8k_qwen2.5_0.5b}

# batches (TBS counts samples per optimizer step, RBS prompts per rollout), lengths in tokens
TBS=${TBS:-128}
RBS=${RBS:-128}
N_SAMPLES=${N_SAMPLES:-5}
MICRO_TRAIN=${MICRO_TRAIN:-4}
MICRO_ROLLOUT=${MICRO_ROLLOUT:-$MICRO_TRAIN}
EPISODES=${EPISODES:-30}
PROMPT_MAX_LEN=${PROMPT_MAX_LEN:-1024}
GENERATE_MAX_LEN=${GENERATE_MAX_LEN:-2048}

# learning
LR=${LR:-1e-6}
L2=${L2:-1e-2}
KL=${KL:-0.01}
KL_ESTIMATOR=${KL_ESTIMATOR:-k3}
ENGINE=${ENGINE:-hf}
SEED=${SEED:-42}
EVAL_STEPS=${EVAL_STEPS:-20}
SAVE_STEPS=${SAVE_STEPS:-20}

# where: one node on a free port; several: the same command on each, with its NODE_RANK and the address of node 0
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NPROC=${NPROC:-$GPUS_PER_NODE}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-20090}
PYTHON=${PYTHON:-python3}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_NCCL_AVOID_RECORD_STREAMS=${TORCH_NCCL_AVOID_RECORD_STREAMS:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # seconds to save in, once asked to stop
export TOKENIZERS_PARALLELISM=false
NODES=(--standalone)
if [[ "$NNODES" != 1 ]]; then
  NODES=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi

# tee outlives SIGTERM and Ctrl-C, and torchrun takes the place of this shell, so that both reach it and the run can save
mkdir -p "$SAVE"
exec > >(trap "" INT TERM; exec tee -a "$SAVE/log_node$NODE_RANK.txt") 2>&1
exec "$PYTHON" -m torch.distributed.run "${NODES[@]}" --nproc-per-node "$NPROC" "$(dirname "$0")/train_colocate.py" \
  --pretrain "$MODEL" --prompt_data "$DATA/train.parquet" --eval_data "$DATA/test.parquet" --save_path "$SAVE" \
  --train_batch_size "$TBS" --rollout_batch_size "$RBS" --n_samples_per_prompt "$N_SAMPLES" \
  --micro_train_batch_size "$MICRO_TRAIN" --micro_rollout_batch_size "$MICRO_ROLLOUT" \
  --num_episodes "$EPISODES" --prompt_max_len "$PROMPT_MAX_LEN" --generate_max_len "$GENERATE_MAX_LEN" \
  --advantage_estimator group_norm --init_kl_coef "$KL" --use_kl_loss --kl_estimator "$KL_ESTIMATOR" \
  --actor_learning_rate "$LR" --l2 "$L2" --engine_type "$ENGINE" --seed "$SEED" \
  --fsdp --adam_offload --bf16 --gradient_checkpointing \
  --eval_steps "$EVAL_STEPS" --save_steps "$SAVE_STEPS" --save_trajectories --use_tensorboard \
  "$@"
