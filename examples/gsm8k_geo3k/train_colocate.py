"""RL on GSM8K: arguments -> strategy -> models -> trainer -> fit. Rollouts and training share the same processes.

    torchrun --nproc-per-node 8 examples/gsm8k_geo3k/train_colocate.py --pretrain MODEL --prompt_data TRAIN

``run_grpo_gsm8k_qwen2.5_0.5b.sh`` calls this; every option of the trainer works here. A row's label chooses its reward
(``gsm8k_rule``: 0.9 x right answer + 0.1 x format); ``--reward`` replaces it.
"""
from lightrft.config.cli import parse_config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.loader import load_tokenizer
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, build_models

DEFAULTS = {
    "advantage_estimator": "group_norm",
    "n_samples_per_prompt": 5,
    "generate_max_len": 2048,
    "max_eval_samples": 0,
    "strategy": "fsdp",
}


def main() -> None:
    """Train with the defaults above; flags win."""
    parsed = parse_config(prog="train_colocate.py", defaults=DEFAULTS)
    config = parsed.config
    with training_session(parsed) as session:
        tokenizer = load_tokenizer(config.model.pretrain, config.data.chat_template)
        prompts = PromptsDataset(config.data, tokenizer, config.rollout.prompt_max_len)
        held_out = PromptsDataset(config.data, tokenizer, config.rollout.prompt_max_len,
                                  "eval") if config.data.eval_data else []
        models = build_models(config, session.strategy)
        SPMDPPOTrainer(config, session.strategy, models, tokenizer, prompts, held_out, session.timer).fit()


if __name__ == "__main__":
    main()
