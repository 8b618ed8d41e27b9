"""Training of reward models: ``torchrun --nproc-per-node N -m lightrft.cli.train_rm --pretrain ...``."""
from collections.abc import Sequence

from lightrft.config.cli import parse_config, ParsedConfig
from lightrft.config.rm_schema import RMConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree of reward models, ``--config`` and ``--dry_run``."""
    train(
        parse_config(argv, prog="lightrft rm", tree=RMConfig,
                     description="Training of a scalar reward model on pairs of a better and a worse answer."))


def train(parsed: ParsedConfig, exits: bool = True) -> None:
    """Train with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.trainer.offline_trainer import train_rows
    from lightrft.trainer.rm_trainer import RMTrainer
    train_rows(parsed, exits, RMTrainer)


if __name__ == "__main__":
    main()
