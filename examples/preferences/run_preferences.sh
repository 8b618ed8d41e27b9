#!/usr/bin/env bash
# Pairs and what learns from them, on a CPU: a careless teacher (the warm-up of the quickstart) answers additions, the exact
# answer tells right from wrong, the pairs train one policy per loss, and all are evaluated on the same held-out problems.
#   LOSSES   losses to train with (default: sigmoid ipo_mean simpo orpo)
#   SEED     of data, sampling and training; OUT: folder of everything; PYTHON: the interpreter
# PREPARE_ARGS, SFT_ARGS and DPO_ARGS in the environment go to their steps.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/preferences}
LOSSES=${LOSSES:-sigmoid ipo_mean simpo orpo}
SEED=${SEED:-42}
PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

# strength and learning rate of each loss: the larger the strength of `sigmoid`, the closer it stays to the teacher; the
# others need the NLL of the right answer, without which both answers become unlikely (they differ in few tokens)
declare -A FLAGS=(
  [sigmoid]="--beta 1 --learning_rate 1e-4"
  [ipo_mean]="--beta 0.5 --learning_rate 1e-3 --nll_loss_coef 1"
  [simpo]="--beta 2 --learning_rate 1e-3 --nll_loss_coef 1"
  [orpo]="--beta 0.5 --learning_rate 1e-3"
)
for loss in $LOSSES; do
  if [[ -z "${FLAGS[$loss]:-}" ]]; then echo "LOSSES=$loss: known are ${!FLAGS[*]}" >&2; exit 2; fi
done

echo "1/4 a careless teacher"
source examples/quickstart/teacher.sh
careless_teacher

echo "2/4 pairs of its right and wrong answers"
"$PYTHON" -m lightrft.cli.generate \
  --pretrain "$OUT/sft/hf" --prompt_data "$OUT/data/train.parquet" --output_path "$OUT/pairs.jsonl" --seed "$SEED" \
  --max_samples 1000 --best_of_n 8 --score exact --post_processor iter_dpo --prompt_max_len 64 --generate_max_len 48

echo "3/4 one policy per loss"
models=("$OUT/sft/hf")
for loss in $LOSSES; do
  "$PYTHON" -m lightrft.cli.train_dpo \
    --pretrain "$OUT/sft/hf" --train_data "$OUT/pairs.jsonl" --save_path "$OUT/$loss" --seed "$SEED" --loss "$loss" \
    --max_len 128 --train_batch_size 32 --max_epochs 3 --logging_steps 20 --disable_ckpt ${FLAGS[$loss]} ${DPO_ARGS:-}
  models+=("$OUT/$loss/hf")
done

echo "4/4 all on the same held-out problems"
exec "$PYTHON" -m lightrft.cli.evaluate \
  --pretrain "${models[@]}" --eval_data "$OUT/data/test.parquet" --output_path "$OUT/evaluation" \
  --score exact --prompt_max_len 64 --generate_max_len 48
