"""Option values with exactly one problem, and parts of the sentence that must say it."""
from typing import Any

GOOD: dict[str, Any] = {"pretrain": "org/model", "prompt_data": ["org/data"]}
EVAL: dict[str, Any] = {"eval_data": ["org/data"]}
KL: dict[str, Any] = {"init_kl_coef": 0.01}

# values -> what the only problem says
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({
        "pretrain": None
    }, ["--pretrain is missing"]),
    ({
        "pretrain": "./no/model"
    }, ["--pretrain ./no/model", "no such folder"]),
    (KL | {
        "ref_pretrain": "/no/ref"
    }, ["--ref_pretrain /no/ref", "no such folder"]),
    ({
        "critic_pretrain": "~/no/critic",
        "advantage_estimator": "gae"
    }, ["--critic_pretrain ~/no/critic", "no such folder"]),
    ({
        "prompt_data": []
    }, ["--prompt_data is missing"]),
    ({
        "prompt_data": ["absent.parquet"]
    }, ["--prompt_data absent.parquet", "no such file"]),
    ({
        "prompt_data": ["./absent@dir"]
    }, ["--prompt_data ./absent@dir", "no such file"]),
    ({
        "eval_data": ["absent.jsonl"]
    }, ["--eval_data absent.jsonl", "no such file"]),
    ({
        "chat_template": "absent.jinja"
    }, ["--chat_template absent.jinja", "no such file"]),
    ({
        "reward": ["absent.py:score=2"]
    }, ["--reward absent.py:score=2", "no such file"]),
    ({
        "reward": ["math=much"]
    }, ["--reward math=much", "a number"]),
    ({
        "remote_rm_url": ["localhost:80"]
    }, ["--remote_rm_url localhost:80", "http://localhost:80"]),
    ({
        "rollout_batch_size": 100,
        "n_samples_per_prompt": 5
    }, ["--train_batch_size 128", "500", "--train_batch_size 125 or 250", "--rollout_batch_size 128"]),
    ({
        "rollout_batch_size": 300,
        "n_samples_per_prompt": 1,
        "advantage_estimator": "reinforce"
    }, ["--rollout_batch_size 256 or 384", "--train_batch_size 100 or 150"]),
    ({
        "rollout_batch_size": 1,
        "train_batch_size": 8
    }, ["--rollout_batch_size 1", "2 ranks", "nearest valid value: 2"]),
    ({
        "train_batch_size": 1
    }, ["--train_batch_size 1", "2 ranks"]),
    ({
        "n_samples_per_prompt": 1
    }, ["--n_samples_per_prompt 1", "group_norm", "nearest valid value: 2"]),
    ({
        "advantages_norm": True,
        "advantage_estimator": "reinforce++"
    }, ["--advantages_norm", "already whitens"]),
    ({
        "critic_pretrain": "org/critic"
    }, ["--critic_pretrain", "trains no critic", "gae"]),
    ({
        "save_value_network": True
    }, ["--save_value_network", "trains no critic"]),
    ({
        "freezing_actor_steps": 3
    }, ["--freezing_actor_steps 3", "trains no critic"]),
    ({
        "freezing_actor_steps": 3,
        "max_steps": 3,
        "advantage_estimator": "gae"
    }, ["--freezing_actor_steps 3", "valid value: 2"]),
    ({
        "advantage_estimator": "group_nom"
    }, ["--advantage_estimator group_nom", "did you mean group_norm"]),
    ({
        "policy_loss": "pop"
    }, ["--policy_loss pop", "did you mean ppo"]),
    ({
        "rollout_correction": "tis"
    }, ["--rollout_correction tis", "known: none"]),
    (KL | {
        "use_kl_loss": True,
        "kl_estimator": "k1"
    }, ["--kl_estimator k1", "k3"]),
    ({
        "use_kl_loss": True
    }, ["--use_kl_loss", "--init_kl_coef 0.01"]),
    ({
        "kl_target": 0.1
    }, ["--kl_target 0.1", "--init_kl_coef 0.01"]),
    ({
        "ref_pretrain": "org/ref"
    }, ["--ref_pretrain", "--init_kl_coef"]),
    (KL | {
        "ref_pretrain": "org/ref",
        "lora_rank": 8
    }, ["--ref_pretrain", "--lora_rank"]),
    ({
        "initial_model_shard_size": 1
    }, ["--initial_model_shard_size", "--init_kl_coef"]),
    ({
        "lora_dropout": 0.1
    }, ["--lora_dropout 0.1", "--lora_rank"]),
    ({
        "lora_rank": 8,
        "target_modules": []
    }, ["--target_modules none", "all-linear"]),
    ({
        "lora_rank": 8,
        "freeze_prefix": ["model.embed"]
    }, ["--freeze_prefix model.embed", "--lora_rank"]),
    ({
        "temperature": 0.0
    }, ["--temperature 0", "greedy"]),
    ({
        "top_p": 1.5
    }, ["--top_p 1.5", "nearest valid value: 1"]),
    ({
        "dual_clip": 1.0
    }, ["--dual_clip 1", "greater than 1"]),
    ({
        "eps_clip": 0.0
    }, ["--eps_clip 0", "a little above 0"]),
    ({
        "stop": [""]
    }, ["--stop", "empty string"]),
    ({
        "loss_agg_norm": 10
    }, ["--loss_agg_norm 10", "seq-mean-token-sum-norm"]),
    ({
        "reward_running_norm_minus_mean": True
    }, ["--reward_running_norm_minus_mean", "add --reward_running_norm or"]),
    ({
        "overlong_buffer": True,
        "overlong_buffer_len": 1024
    }, ["--overlong_buffer_len 1024", "nearest valid value: 1023"]),
    ({
        "prompt_data": ["a", "b"],
        "prompt_data_probs": [1.0]
    }, ["--prompt_data_probs", "1 values for 2"]),
    ({
        "prompt_data": ["a", "b"],
        "prompt_data_probs": [1.0, 1.0]
    }, ["--prompt_data_probs", "nearest valid value: 0.5,0.5"]),
    ({
        "input_template": "no place"
    }, ["--input_template", "exactly once"]),
    ({
        "adam_betas": [0.9]
    }, ["--adam_betas", "two values"]),
    ({
        "eval_steps": 2
    }, ["--eval_steps 2", "--eval_data"]),
    ({
        "eval_at_start": True
    }, ["--eval_at_start", "--eval_data"]),
    ({
        "print_samples": 2
    }, ["--print_samples 2", "--eval_data"]),
    (EVAL | {
        "eval_pass_k": [2]
    }, ["--eval_pass_k 2", "nearest valid value: 1", "--eval_n_samples 2"]),
    (EVAL | {
        "eval_n_samples": 2
    }, ["--eval_n_samples 2", "--eval_temperature"]),
    ({
        "save_steps": 0
    }, ["--save_steps 0", "-1"]),
    ({
        "disable_ckpt": True,
        "load_checkpoint": True
    }, ["--load_checkpoint", "--disable_ckpt"]),
    ({
        "disable_ckpt": True,
        "save_hf_ckpt": True
    }, ["--save_hf_ckpt", "--disable_ckpt"]),
    ({
        "disable_ckpt": True,
        "best_metric": "reward/mean"
    }, ["--best_metric", "--disable_ckpt"]),
    ({
        "best_metric": "eval/all/pass@1"
    }, ["--best_metric", "--eval_data"]),
    (EVAL | {
        "best_metric": "eval/all/pass@1",
        "eval_steps": 0
    }, ["--best_metric eval/all/pass@1", "--eval_steps 0", "--eval_steps -1"]),
    (EVAL | {
        "best_metric": "eval/openai/gsm8k/pass@4"
    }, ["--best_metric", "nearest valid value: eval/openai/gsm8k/pass@1", "--eval_pass_k 4"]),
    (EVAL | {
        "best_metric": "eval/all/avg@4"
    }, ["--best_metric", "nearest valid value: eval/all/avg@1", "--eval_n_samples 4"]),
    ({
        "best_metric": "rewards/mean"
    }, ["--best_metric rewards/mean", "did you mean reward"]),
    ({
        "best_metric": "time/step_s"
    }, ["--best_metric time/step_s", "begin with reward/"]),
    ({
        "value_clip": 0.1
    }, ["--value_clip 0.1", "trains no critic"]),
    ({
        "critic_learning_rate": 1e-4
    }, ["--critic_learning_rate 0.0001", "trains no critic"]),
    ({
        "lambd": 0.5
    }, ["--lambd 0.5", "group_norm does not use it", "gae"]),
    ({
        "std_eps": 0.5,
        "advantage_estimator": "reinforce"
    }, ["--std_eps 0.5", "reinforce does not use it", "group_norm"]),
    ({
        "kl_estimator": "k2"
    }, ["--kl_estimator k2", "--init_kl_coef 0.01"]),
    (KL | {
        "kl_horizon": 100
    }, ["--kl_horizon 100", "--kl_target 0.1"]),
    ({
        "num_trajectories_to_save": 3
    }, ["--num_trajectories_to_save 3", "--save_trajectories"]),
    ({
        "strategy": "single"
    }, ["--strategy single", "2 ranks", "fsdp"]),
    ({
        "fsdp_cpu_offload": True,
        "adam_offload": True
    }, ["--adam_offload", "--fsdp_cpu_offload"]),
    ({
        "fsdp_shard_size": 3
    }, ["--fsdp_shard_size 3", "nearest valid value: 2"]),
    (KL | {
        "initial_model_shard_size": 3
    }, ["--initial_model_shard_size 3", "nearest valid value: 2"]),
]
