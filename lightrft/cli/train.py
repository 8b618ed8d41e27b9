"""Train a policy by reinforcement learning.

    torchrun --nproc-per-node 8 -m lightrft.cli.train --pretrain MODEL --prompt_data DATA ...
"""
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrft.cli.command_line import parse_command
from lightrft.config.cli import ParsedConfig


def main(argv: Sequence[str] | None = None, defaults: dict[str, Any] | None = None,
         prog: str = "lightrft train") -> None:
    """Run the command line: every option of the tree, ``--config``, ``--plugin`` and ``--dry_run``.

    Args:
        argv: words of the command line; None: those of this process.
        defaults: option values of a script, by name; flags and YAML keys win over them.
        prog: name of the script in messages.
    """
    train(parse_command(argv, prog, "Reinforcement fine-tuning of a language model.", defaults=defaults))


def train(parsed: ParsedConfig, exits: bool = True, functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """Train with parsed options.

    Args:
        exits: as in :func:`lightrft.trainer.session.training_session`.
        functions: of this program, by the names under which ``--reward`` selects them.
    """
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.datasets.prompts_dataset import PromptsDataset
    from lightrft.models.tokenizer import load_tokenizer
    from lightrft.rewards.manager import RewardManager
    from lightrft.rewards.placement import ScorerSetup
    from lightrft.trainer.hub_files import fetch_once
    from lightrft.trainer.model_media import open_media
    from lightrft.trainer.pretraining_loss import read_pretraining
    from lightrft.trainer.session import training_session
    from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, build_models
    from lightrft.trainer.trial import TrialContext
    config, data = parsed.config, parsed.config.data
    with training_session(parsed, exits, TrialContext(functions=functions or {})) as session:
        strategy = session.strategy
        fetch_once(strategy, config, data)
        tokenizer = load_tokenizer(config.model.pretrain, data.chat_template)
        path, limit = config.model.pretrain, config.rollout.prompt_max_len
        media = open_media(path, tokenizer, data, strategy)
        prompts = PromptsDataset(data, tokenizer, limit, media=media)
        held_out = PromptsDataset(data, tokenizer, limit, "eval", media) if config.held_out else []
        setup = ScorerSetup.of(config, strategy.device, strategy, media)
        models, rewards = build_models(config, strategy), RewardManager(config.reward, functions, setup)
        SPMDPPOTrainer(config, strategy, models, tokenizer, prompts, held_out, session.timer, rewards, media=media,
                       pretraining=read_pretraining(config, tokenizer, media)).fit()


if __name__ == "__main__":
    main()
