#!/usr/bin/env bash
# The quickstart: data and a tiny untrained model -> supervised warm-up -> GRPO on two FSDP2 ranks. On a laptop, in minutes.
# Every argument is passed on to the GRPO trainer, e.g.  run_quickstart.sh --seed 2 --advantage_estimator rloo
# --dry_run stops before the warm-up. PREPARE_ARGS and SFT_ARGS in the environment go to the first two steps. EXAMPLE is
# the folder of the example, NPROC the number of processes: by default one where there is one GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."

EXAMPLE=${EXAMPLE:-examples/quickstart}
OUT=${OUT:-runs/$(basename "$EXAMPLE")}
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [[ "$GPUS" != 0 && "${CUDA_VISIBLE_DEVICES:-}" =~ ^[^,]+$ ]]; then GPUS=1; fi
NPROC=${NPROC:-$((GPUS == 1 ? 1 : 2))}
PYTHON=${PYTHON:-python3}
GRPO=("$EXAMPLE/train_colocate.py" --prompt_data "$OUT/data/train.parquet"
      --eval_data "$OUT/data/test.parquet" --save_path "$OUT")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

DRY_RUN=
for word in "$@"; do
  if [[ "$word" == -h || "$word" == --help ]]; then exec "$PYTHON" "${GRPO[@]}" --help; fi
  if [[ "$word" == --dry_run ]]; then DRY_RUN=1; fi
done
SEED=42
for ((i = 1; i <= $#; i++)); do
  if [[ "${!i}" == "--seed" ]]; then j=$((i + 1)); SEED=${!j:-}; fi
  if [[ "${!i}" == --seed=* ]]; then SEED=${!i#--seed=}; fi
done

echo "1/3 data and an untrained model"
"$PYTHON" "$EXAMPLE/prepare.py" --out "$OUT" --seed "${SEED:-42}" ${PREPARE_ARGS:-}

# report what the trainer would refuse now, before the warm-up
REPORT=$(env RANK=0 LOCAL_RANK=0 WORLD_SIZE="$NPROC" LOCAL_WORLD_SIZE="$NPROC" \
  "$PYTHON" "${GRPO[@]}" --pretrain "$OUT/base" "$@" --dry_run)
if [[ "$DRY_RUN" ]]; then echo "$REPORT"; exit; fi

echo "2/3 supervised warm-up"
"$PYTHON" -m lightrft.cli.train_sft \
  --pretrain "$OUT/base" --train_data "$OUT/data/sft.parquet" --save_path "$OUT/sft" --seed "$SEED" \
  --train_batch_size 32 --learning_rate 3e-3 --max_len 128 --logging_steps 100 --disable_ckpt ${SFT_ARGS:-}

echo "3/3 GRPO on $NPROC processes"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" "${GRPO[@]}" \
  --pretrain "$OUT/sft/hf" "$@"
