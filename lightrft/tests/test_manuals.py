"""Commands of OpenRLHF's manual, with tiny paths in place of its own: what is refused names the remedy, the rest plans.

Batch inference is in ``inference/tests/test_generate.py``, where its commands run.
"""
import re
import shlex
from importlib import import_module

import pytest

from lightrft.cli.main import COMMANDS
from lightrft.tests.support import tiny
from lightrft.tests.support.preference_runs import write_rows

SHORT = {
    "SIZES": "--train_batch_size 256 --save_steps -1 --logging_steps 1 --eval_steps -1 --max_epochs 1 --bf16",
    "PACKED": "--flash_attn --packing_samples --gradient_checkpointing --load_checkpoint",
    "PAIRS": "--dataset HOME/pairs.jsonl --prompt_key prompt --chosen_key chosen --rejected_key rejected",
    "DEMOS": "--dataset HOME/judged.jsonl --input_key prompt --output_key completion",
}
REFUSED = {"flash_attn", "packing_samples", "dataset_probs", "attn_implementation", "ring_attn_size"}
MANUAL = {
    "sft": """sft DEMOS --max_len 2048 --input_template 'User: {}' --micro_train_batch_size 2 --max_samples 500000
        --zero_stage 2 --learning_rate 5e-6 SIZES PACKED""",
    "continued pretraining": """sft --dataset HOME/judged.jsonl --input_key completion --max_len 4096 --pretrain_mode
        --zero_stage 3 --lr_scheduler cosine_with_min_lr --l2 0.01 SIZES --attn_implementation x --packing_samples""",
    "reward model": """rm PAIRS --dataset_probs 1.0 --micro_train_batch_size 1 --max_len 8192 --zero_stage 3
        --learning_rate 9e-6 SIZES PACKED --apply_chat_template --loss sigmoid --value_head_prefix score""",
    "process reward model": """prm --dataset HOME/steps.jsonl --input_key input --label_key label --max_len 8192
        --micro_train_batch_size 8 --placeholder_token '#' --reward_tokens + - --zero_stage 3 --learning_rate 1e-6
        --wandb_group prm SIZES PACKED""",
    "DPO": """dpo PAIRS --dataset_probs 1.0 --micro_train_batch_size 1 --max_len 8192 --zero_stage 3 --beta 0.1
        --learning_rate 5e-7 --apply_chat_template --ref_offload SIZES PACKED""",
    "IPO": "dpo PAIRS --ipo --beta 0.1 --max_len 2048 --zero_stage 2 --nll_loss_coef 0.1 --adam_offload SIZES",
    "cDPO": "dpo PAIRS --label_smoothing 0.1 --eval_dataset HOME/pairs.jsonl --ref_pretrain HOME/model SIZES",
    "KTO": """kto DEMOS --label_key label --micro_train_batch_size 1 --max_len 2048 --zero_stage 3 --beta 0.1
        --learning_rate 5e-7 --desirable_loss_weight 1 --undesirable_loss_weight 1.33 SIZES PACKED""",
    "distillation": """kd DEMOS --max_len 4096 --zero_stage 2 --teacher_model HOME/model --teacher_offload --kd_coef 0.4
        --learning_rate 5e-6 --l2 0 SIZES PACKED""",
    "rejection sampling": """sft DEMOS --dataset_probs 1.0 --max_len 4096 --lr_scheduler constant --zero_stage 2
        --learning_rate 2e-6 SIZES PACKED""",
    "iterative DPO": """dpo PAIRS --dataset_probs 1.0 --max_len 4096 --lr_scheduler constant --ref_pretrain HOME/model
        --beta 0.1 --zero_stage 3 --learning_rate 5e-7 --ring_attn_size 2 SIZES PACKED""",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.save_model(folder / "model", max_position_embeddings=8192)
    write_rows(folder)
    return folder


def ended(words, capsys):
    """Exit code and output of a command in this process."""
    with pytest.raises(SystemExit) as done:
        import_module(COMMANDS[words[0]][0]).main(words[1:])
    return done.value.code, "".join(capsys.readouterr())


@pytest.mark.parametrize("name", MANUAL)
def test_a_command_of_the_manual_plans(name, home, tmp_path, capsys):
    text = re.sub("|".join(SHORT), lambda found: SHORT[found[0]], MANUAL[name]).replace("HOME", str(home))
    text = " ".join(text.split())
    flags = [*re.findall(r"--\w+.*?(?= --|$)", text), f"--pretrain {home}/model"]
    refused = {flag for flag in flags if flag[2:].split()[0] in REFUSED}
    command, folder = text.split()[0], ["--save_path", str(tmp_path)]
    if refused:
        code, said = ended([command, *shlex.split(" ".join(flags)), *folder], capsys)
        told = re.findall(r"(\w+) is (?:not an option here: |an option of another trainer; here: )\w+", said)
        assert code == 2 and {flag[2:].split()[0] for flag in refused} == {*told} and "unknown" not in said, said
    flags += ["--strategy deepspeed"] * ("--zero_stage 3" in flags)  # without, an error names this flag
    kept = shlex.split(" ".join(flag for flag in flags if flag not in refused))
    code, said = ended([command, *kept, *folder, "--dry_run", "--plan_gpus", "8xH100"], capsys)
    assert not code, said
