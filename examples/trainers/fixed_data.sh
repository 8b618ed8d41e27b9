# Sourced by the scripts that train on fixed data: the variables that they share, and `fit MODULE FLAGS...`, which starts
# the ranks with these variables as flags.
source "$(dirname "${BASH_SOURCE[0]}")/../torchrun.sh" # NNODES, NPROC, PYTHON ...

EVAL_DATA=${EVAL_DATA:-$(held_out "$DATA")}
TBS=${TBS:-128}
MICRO_TRAIN=${MICRO_TRAIN:-4}
EPOCHS=${EPOCHS:-1}
MAX_LEN=${MAX_LEN:-2048}
L2=${L2:-0}
SEED=${SEED:-42}
EVAL_STEPS=${EVAL_STEPS:-100}
SAVE_STEPS=${SAVE_STEPS:-100}

# Every run script sets MODEL, DATA, SAVE and LR; its own FLAGS follow, and win.
fit() {
  launch "$1" \
    --pretrain "$MODEL" --train_data "$DATA" --eval_data "$EVAL_DATA" --save_path "$SAVE" \
    --train_batch_size "$TBS" --micro_train_batch_size "$MICRO_TRAIN" --max_epochs "$EPOCHS" --max_len "$MAX_LEN" \
    --learning_rate "$LR" --l2 "$L2" --seed "$SEED" --eval_steps "$EVAL_STEPS" --save_steps "$SAVE_STEPS" \
    --use_tensorboard --fsdp --bf16 --gradient_checkpointing "${@:2}"
}
