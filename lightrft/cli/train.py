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
    from lightrft.trainer.session import training_session
    from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, trainer_arguments
    from lightrft.trainer.trial import TrialContext
    with training_session(parsed, exits, TrialContext(functions=functions or {})) as session:
        parts = trainer_arguments(parsed.config, session.strategy, session.timer, functions or {})
        SPMDPPOTrainer(**parts).fit()


if __name__ == "__main__":
    main()
