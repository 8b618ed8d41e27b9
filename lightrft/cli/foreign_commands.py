"""Names of commands, scripts and methods in other trainers, and the command here that does the same."""
import re
from collections.abc import Collection
from difflib import get_close_matches

from lightrft.config.presets import RECIPES

SHORT = 5  # letters up to which a word with a typing error is like too many others

_ALIKE: dict[str, str] = {
    "train": "train_ppo train_ppo_ray train_colocate train_vl main_ppo main_ppo_trainer rl rft rlvr online_rl",
    "sft": "train_sft sft_trainer fsdp_sft_trainer sft_trainer_ray finetune fine_tune finetuning",
    "sft --pretrain_mode": "pt pretrain pretraining",
    "rm": "train_rm train_rm_vl train_rm_al train_srm_vl train_srm_al reward reward_model reward_modeling",
    "grm": "train_grm train_grm_vl",
    "prm": "train_prm",
    "dpo": "train_dpo cpo",
    "dpo --loss simpo": "simpo",
    "dpo --loss orpo": "orpo",
    "dpo --ipo": "ipo",
    "kto": "train_kto",
    "kd": "train_kd distill distillation gkd",
    "train --teacher_model MODEL --reward format=0": "opd train_opd on_policy_distillation",
    "dpo, kto, rm, kd or train": "rlhf",
    "generate": "batch_inference main_generation main_generation_server infer inference sample predict",
    "evaluate": "eval main_eval evaluation",
    "chat": "interactive_chat cli_demo",
    "serve_rm": "serve_reward reward_server",
    "merge_lora": "lora_combiner merge_adapter merge_adapters",
    "convert": "model_merger legacy_model_merger zero_to_fp32 convert_dcp_to_hf",
    "doctor": "env diagnose",
}
"""Command here -> the words for it elsewhere: of OpenRLHF, LightRFT, verl, TRL, ms-swift."""

FOREIGN = {
    **{name: f"train --recipe {name}" for name in RECIPES},
    **{word: command for command, words in _ALIKE.items() for word in words.split()},
}


def of_another_trainer(name: str) -> str:
    """Return the command here for one of another trainer, or an empty string. A file or a module is the name at its
    end: ``openrlhf.cli.train_sft``, ``examples/train_vl.py``."""
    stem = re.split(r"[./\\]", name.removesuffix(".py"))[-1]
    return FOREIGN.get(stem.lower().replace("-", "_"), "")


def unknown_command(name: str, commands: Collection[str]) -> str:
    """Explain that ``name`` is none of ``commands``: name the command that other trainers call so, else the nearest."""
    if command := of_another_trainer(name):
        return f"unknown command {name!r}; here: lightrft {command}"
    word = name.replace("-", "_")
    alike = [one for one in commands if one.startswith(word) or abs(len(one) - len(word)) <= 2]
    theirs = get_close_matches(word, [one for one in FOREIGN if len(one) > SHORT], n=1, cutoff=0.85)
    near = [FOREIGN[one] for one in theirs] or get_close_matches(word, alike, n=1, cutoff=0.66)
    return f"unknown command {name!r}" + f" (did you mean {''.join(near)}?)" * bool(near)
