"""Commands with further flags of the manuals of OpenRLHF and ms-swift, with tiny paths in place of their own.

What is refused names the remedy; the rest plans, with those remedies that take the same value. Batch inference is in
``inference/tests/test_generate.py``, where its commands run, and the merging of adapters in ``test_convert.py``.
"""
import re
import shlex
from importlib import import_module

import pytest

from lightrft.cli.main import COMMANDS
from lightrft.cli.offline import OFFLINE
from lightrft.config.compat import ALIASES, GRANTED, refusal
from lightrft.config.inference_schema import ChatConfig
from lightrft.config.schema import Config
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.synonyms import in_own_flags, synonyms
from lightrft.config.tree import options
from lightrft.tests.support import tiny
from lightrft.tests.support.preference_runs import write_rows
from lightrft.tests.support.scorers import save_scorer
from lightrft.tests.support.tiny_task import write_rows as write_lines

TREES = {name: command.tree for name, command in OFFLINE.items()}
TREES |= {"train": Config, "serve_rm": ServeConfig, "chat": ChatConfig}
SHORT = {
    "SIZES": "--train_batch_size 256 --save_steps -1 --logging_steps 1 --eval_steps -1 --max_epochs 1 --bf16",
    "PACKED": "--flash_attn --packing_samples --gradient_checkpointing --load_checkpoint",
    "PAIRS": "--dataset HOME/pairs.jsonl --prompt_key prompt --chosen_key chosen --rejected_key rejected",
    "DEMOS": "--dataset HOME/judged.jsonl --input_key prompt --output_key completion",
    "DOTTED": """--actor.model_name_or_path HOME/model --data.max_len 2048 --data.max_samples 500000
        --ckpt.output_dir HOME/out --ckpt.save_steps -1 --ckpt.max_num 3 --ckpt.load_enable --ckpt.save_hf
        --logger.logging_steps 1 --logger.wandb.key KEY --logger.wandb.project tiny --eval.steps -1
        --train.batch_size 256 --train.micro_batch_size 2 --train.max_epochs 1 --train.seed 42 --ds.zero_stage 2
        --ds.packing_samples --ds.param_dtype bf16 --ds.attn_implementation flash_attention_2 --ds.adam_offload
        --ds.use_universal_ckpt --adam.lr 5e-6 --actor.gradient_checkpointing_enable""",
    # ms-swift's
    "SWIFT": """--torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --eval_steps 100
        --val_dataset HOME/EVALUATED --per_device_eval_batch_size 1 --learning_rate 1e-4 --warmup_ratio 0.05
        --gradient_accumulation_steps 16 --save_steps 100 --save_total_limit 2 --logging_steps 5 --max_length 2048
        --output_dir output
        --dataloader_num_workers 4 --dataset_num_proc 4""",
    "LORA": "--train_type lora --lora_rank 8 --lora_alpha 32 --target_modules all-linear --deepspeed zero2",
    "FULL": "--train_type full --deepspeed zero3 --attn_impl flash_attn --save_only_model true --weight_decay 0.1",
}
SAME = {"model", "dataset", "num_train_epochs", "save_total_limit", "max_length", "output_dir", "warmup_ratio",
        "weight_decay", "ref_model", "reward_model", "num_generations", "max_completion_length", "response_length",
        "actor_learning_rate", "learning_rate", "prompt_max_len", "system", "epsilon", "lam",
        "num_ppo_epochs", "max_grad_norm", "lr_scheduler_type", "cliprange_value", "kl_coef", "val_dataset",
        "num_iterations", "loss_type"}  # yapf: disable
OTHER = {"ds.param_dtype", "logger.wandb.key", "train.dynamic_batch_enable",
         "train.async_enable", "algo.advantage.is_correction_enable", "actor.eps_clip_low_high",
         "reward.clip_range", "reward.normalize_enable",
         "algo.dynamic_filtering_enable"}  # yapf: disable
"""Plain flags whose remedy takes the same value, and dotted ones whose remedy does not."""
MANUAL = {
    "DPO":
    """dpo PAIRS --dataset_probs 1.0 --micro_train_batch_size 1 --max_len 8192 --zero_stage 3 --beta 0.1
        --learning_rate 5e-7 --apply_chat_template --input_template '' --ref_offload SIZES PACKED""",
    "IPO":
    "dpo PAIRS --ipo --beta 0.1 --max_len 2048 --zero_stage 2 --nll_loss_coef 0.1 --adam_offload SIZES",
    "cDPO, dotted flags":
    """dpo --data.dataset HOME/pairs.jsonl --eval.dataset HOME/pairs.jsonl --data.prompt_key prompt
        --data.chosen_key chosen --data.rejected_key rejected --model.label_smoothing 0.1 --model.beta 0.1
        --model.aux_loss_coef 0 --ref.model_name_or_path HOME/model --ref.offload --model.nll_loss_coef 0.1
        DOTTED --ds.ring_attn_size 2""",
    "KTO":
    """kto DEMOS --label_key label --micro_train_batch_size 1 --max_len 2048 --zero_stage 3 --beta 0.1
        --learning_rate 5e-7 --desirable_loss_weight 1 --undesirable_loss_weight 1.33 SIZES PACKED""",
    "distillation":
    """kd DEMOS --max_len 4096 --zero_stage 2 --teacher_model HOME/model --teacher_offload --kd_coef 0.4
        --learning_rate 5e-6 --l2 0 SIZES PACKED""",
    "SFT, dotted flags":
    """sft --data.dataset HOME/judged.jsonl --data.input_key prompt --data.output_key completion
        --data.input_template 'User: {}' --data.dataset_probs 1.0 --lr_scheduler constant --min_lr_ratio 0.1 DOTTED
        --ds.lora.rank 16 --ds.lora.alpha 32 --muon.lr 0.02""",
    "PPO, dotted flags":
    """train --ref.num_nodes 1 --ref.num_gpus_per_node 8 --reward.num_nodes 1 --critic.num_gpus_per_node 8
        --actor.num_nodes 1 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all
        --vllm.gpu_memory_utilization 0.5 --reward.model_name_or_path HOME/rm --critic.model_name_or_path HOME/model
        --rollout.batch_size 1024 --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384
        --rollout.n_samples_per_prompt 1 --prompt_max_len 1024 --rollout.max_new_tokens 1024 --actor.adam.lr 5e-7
        --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 --algo.kl.use_loss --algo.kl.estimator k2
        --algo.advantage.estimator gae --actor.eps_clip_low_high 0.2 0.28 --reward.clip_range -10 10
        --data.prompt_dataset HOME/rl/train.jsonl --data.input_key prompt --data.label_key ground_truth
        --data.apply_chat_template --reward.normalize_enable --vllm.sync_backend nccl --vllm.enforce_eager
        --vllm.enable_sleep --ds.enable_sleep --train.agent_func_path agent.py --train.async_enable
        --algo.advantage.is_correction_enable --algo.dynamic_filtering_enable DOTTED""",
    "server, dotted flags":
    """serve_rm --reward.model_name_or_path HOME/rm --port 5000 --ds.param_dtype bf16 --ds.attn_implementation x
        --reward.normalize_enable --data.max_len 8192 --batch_size 16""",
    "chat":
    """chat --pretrain HOME/model --bf16 --max_new_tokens 128 --temperature 0.7 --top_p 0.9 --flash_attn
        --input_template 'User: {}'""",
    "swift sft":
    """sft --model HOME/model --dataset HOME/judged.jsonl --system 'You are helpful.' --model_author swift
        --model_name tiny SWIFT LORA""",
    "swift rlhf dpo":
    """dpo --rlhf_type dpo --model HOME/model --dataset HOME/pairs.jsonl --split_dataset_ratio 0.01
        --beta 0.1 --rpo_alpha 0.1 --padding_free true --loss_type sigmoid SWIFT FULL""",
    "swift rlhf simpo":
    """dpo --rlhf_type simpo --model HOME/model --dataset HOME/pairs.jsonl --streaming true
        --simpo_gamma 1.0 --beta 2.0 --loss_type simpo SWIFT FULL""",
    "swift rlhf kto":
    """kto --rlhf_type kto --model HOME/model --dataset HOME/judged.jsonl --beta 0.1
        --desirable_weight 1.0 --undesirable_weight 1.33 --ref_model HOME/model SWIFT FULL""",
    "swift rlhf rm":
    """rm --rlhf_type rm --model HOME/model --dataset HOME/pairs.jsonl --load_from_cache_file true
        --center_rewards_coefficient 0.01 SWIFT LORA""",
    "swift rlhf gkd":
    """kd --rlhf_type gkd --model HOME/model --teacher_model HOME/model --dataset HOME/judged.jsonl
        --seq_kd true --lmbda 0.5 --beta 0.5 --temperature 0.9 --max_completion_length 512 SWIFT FULL""",
    "swift rlhf ppo":
    """train --rlhf_type ppo --model HOME/model --reward_model HOME/rm --dataset HOME/rl/train.jsonl
        --response_length 512 --temperature 0.7 --num_ppo_epochs 4 --kl_coef 0.05 --cliprange 0.2 --cliprange_value 0.2
        --vf_coef 0.1 --gamma 1.0 --lam 0.95 --whiten_rewards false --num_mini_batches 1 --missing_eos_penalty 1.0
        --local_rollout_forward_batch_size 64 --num_sample_generations 10 SWIFT FULL""",
    "swift rlhf grpo":
    """train --rlhf_type grpo --model HOME/model --reward_funcs accuracy format --dataset
        HOME/rl/train.jsonl --num_generations 8 --max_completion_length 512 --temperature 1.0 --top_p 0.9 --top_k 50
        --beta 0.04 --num_iterations 1 --epsilon 0.2 --log_completions true --use_vllm true --vllm_mode colocate
        --vllm_gpu_memory_utilization 0.5 --vllm_max_model_len 2048 --sleep_level 1 --offload_model true
        --offload_optimizer true --dynamic_sample true --max_resample_times 3 --overlong_filter true
        --external_plugins plugin.py --report_to tensorboard SWIFT LORA""",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models and rows of text."""
    folder = tmp_path_factory.mktemp("home")
    tiny.save_model(folder / "model", max_position_embeddings=8192)
    save_scorer(folder / "rm", seed=1)
    write_rows(folder)
    (folder / "rl").mkdir()
    for split in ("train", "test"):
        write_lines(folder / "rl" / f"{split}.jsonl", [math_row(i) for i in range(128)])
    return folder


def math_row(i):
    """A row as LightRFT's preprocessing writes it."""
    return {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"What is {i}+{i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)}, "extra_info": {"label": "gsm8k_rule"}
            }  # yapf: disable


def ended(words, capsys):
    """Exit code and output of a command in this process."""
    with pytest.raises(SystemExit) as done:
        import_module(COMMANDS[words[0]][0]).main(words[1:])
    return done.value.code, "".join(capsys.readouterr())


def parted(command, flags):
    """Flags that are options, aliases or synonyms here, or ask for what always holds, and those that are refused."""
    tree = TREES[command]
    known = {*options(tree), *(alias for alias, (name, _) in ALIASES.items() if name in options(tree)),
             *synonyms(tree), *tree.GRANTS, *GRANTED}  # yapf: disable
    spelt = {flag: flag.removeprefix("data.").replace(".", "_") for flag in map(name_of, flags)}
    known |= {flag for flag, name in spelt.items() if name in synonyms(tree)}
    known |= {name_of(flag) for flag in flags if in_own_flags(flag.split(), tree) != flag.split()}
    return [one for one in flags if name_of(one) in known], [one for one in flags if name_of(one) not in known]


def name_of(flag):
    return flag[2:].split()[0]


def translated(command, flag):
    """The option that the error names, with the value of the flag."""
    name, _, value = flag[2:].partition(" ")
    ours = re.search(r"--\w+", refusal(name, options(TREES[command])).partition("; here: ")[2])
    return f"{ours[0]} {value}" if ours else ""


def takes_the_same(name):
    return name in SAME or "." in name and name not in OTHER and not name.endswith(("_nodes", "_per_node"))


@pytest.mark.parametrize("name", MANUAL)
def test_a_command_of_the_manual_plans(name, home, tmp_path, capsys):
    text = re.sub("|".join(SHORT), lambda found: SHORT[found[0]], MANUAL[name])
    data = re.search(r"HOME/(\S+jsonl)", text)
    text = text.replace("EVALUATED", data[1] if data else "").replace("HOME", str(home))
    command, text = text.split()[0], " ".join(text.split())
    flags = re.findall(r"--\w+.*?(?= --|$)", text)
    if command in OFFLINE and not {"pretrain", "model", "actor.model_name_or_path"} & {*map(name_of, flags)}:
        flags.append(f"--pretrain {home}/model")
    kept, refused = parted(command, flags)
    folder = ["--save_path", str(tmp_path)] * (command in {"train", *OFFLINE})
    if refused:
        code, said = ended([command, *shlex.split(" ".join(flags)), *folder], capsys)
        told = re.findall(r"([\w.]+) is (?:not an option here: |an option of another \w+; here: )\w+",
                          said.replace(": --", ": "))
        assert code == 2 and {*map(name_of, refused)} == {*told} and "unknown" not in said, said
    moved = [translated(command, flag) for flag in refused if takes_the_same(name_of(flag))]
    added = ["--engine_type vllm"] * ("--vllm." in text)
    words = [*shlex.split(" ".join([*kept, *moved, *added])), *folder]
    code, said = ended([command, *words, "--dry_run", *["--plan_gpus", "8xH100"] * bool(folder)], capsys)
    assert not code, said
