"""Training on judged answers: ``torchrun --nproc-per-node N -m lightrft.cli.train_kto --pretrain ...``."""
from collections.abc import Sequence

from lightrft.config.cli import parse_config, ParsedConfig
from lightrft.config.preference_schema import KTOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
    train(
        parse_config(argv, prog="lightrft kto", tree=KTOConfig,
                     description="Training on answers that are desirable or not, each on its own: KTO."))


def train(parsed: ParsedConfig, exits: bool = True) -> None:
    """Train with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.trainer.kto_trainer import KTOTrainer
    from lightrft.trainer.offline_trainer import train_rows
    train_rows(parsed, exits, KTOTrainer)


if __name__ == "__main__":
    main()
