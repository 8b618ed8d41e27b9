#!/usr/bin/env bash
# After run_preferences.sh: its pairs train a reward model, which is then the only reward of GRPO on the careless teacher.
#   OUT, SEED, PYTHON as there; RM_ARGS and GRPO_ARGS in the environment go to their steps.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/preferences}
SEED=${SEED:-42}
PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
if [[ ! -f "$OUT/pairs.jsonl" ]]; then echo "$OUT/pairs.jsonl is missing: run_preferences.sh writes it" >&2; exit 2; fi

echo "1/3 a reward model, on all pairs but the last 100"
head -n -100 "$OUT/pairs.jsonl" > "$OUT/pairs_train.jsonl"
tail -n 100 "$OUT/pairs.jsonl" > "$OUT/pairs_test.jsonl"
"$PYTHON" -m lightrft.cli.train_rm \
  --pretrain "$OUT/sft/hf" --train_data "$OUT/pairs_train.jsonl" --eval_data "$OUT/pairs_test.jsonl" \
  --save_path "$OUT/rm" --seed "$SEED" --max_len 128 --train_batch_size 32 --max_epochs 3 --learning_rate 1e-3 \
  --logging_steps 20 --disable_ckpt ${RM_ARGS:-}

echo "2/3 GRPO, scored by the reward model alone"
"$PYTHON" examples/quickstart/train_colocate.py \
  --pretrain "$OUT/sft/hf" --prompt_data "$OUT/data/train.parquet" --save_path "$OUT/grpo" --seed "$SEED" \
  --reward_pretrain "$OUT/rm/hf" --reward_recipe quickstart_rule:rm=1 \
  --strategy auto --max_steps 15 --eval_steps 0 --no_eval_at_start --disable_ckpt ${GRPO_ARGS:-}

echo "3/3 by the exact answer, on held-out problems"
exec "$PYTHON" -m lightrft.cli.evaluate \
  --pretrain "$OUT/sft/hf" "$OUT/grpo/hf" --eval_data "$OUT/data/test.parquet" --output_path "$OUT/evaluation_grpo" \
  --score exact --prompt_max_len 64 --generate_max_len 48
