"""Distillation: ``torchrun --nproc-per-node N -m lightrft.cli.train_kd --pretrain ... --teacher_model ...``."""
from collections.abc import Sequence

from lightrft.config.cli import parse_config, ParsedConfig
from lightrft.config.kd_schema import KDConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
    train(
        parse_config(argv, prog="lightrft kd", tree=KDConfig,
                     description="Distillation of a teacher into a student, on conversations."))


def train(parsed: ParsedConfig, exits: bool = True) -> None:
    """Train with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.trainer.kd_trainer import KDTrainer
    from lightrft.trainer.offline_trainer import train_rows
    train_rows(parsed, exits, KDTrainer)


if __name__ == "__main__":
    main()
