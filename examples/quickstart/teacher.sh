# Sourced by scripts that start from a careless teacher: a tiny model of the quickstart, which often forgets the carry, with
# its prompts in OUT/data. It is made once. PREPARE_ARGS and SFT_ARGS in the environment go to its two steps.
careless_teacher() {
  if [[ -f "$OUT/sft/hf/README.md" ]]; then return; fi # the last file that is written
  "$PYTHON" examples/quickstart/prepare.py --out "$OUT" --seed "$SEED" ${PREPARE_ARGS:-}
  "$PYTHON" -m lightrft.cli.train_sft \
    --pretrain "$OUT/base" --train_data "$OUT/data/sft.parquet" --save_path "$OUT/sft" --seed "$SEED" \
    --train_batch_size 32 --learning_rate 3e-3 --max_len 128 --logging_steps 100 --disable_ckpt ${SFT_ARGS:-}
}
