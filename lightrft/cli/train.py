"""Train a policy by reinforcement learning.

    torchrun --nproc-per-node 8 -m lightrft.cli.train --pretrain MODEL --prompt_data DATA ...
"""
from collections.abc import Sequence

from lightrft.config.cli import parse_config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.loader import load_tokenizer
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, build_models


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config``, ``--plugin`` and ``--dry_run``."""
    parsed = parse_config(argv, prog="python -m lightrft.cli.train",
                          description="Reinforcement fine-tuning of a language model.")
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
