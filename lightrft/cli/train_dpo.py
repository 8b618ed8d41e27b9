"""Training on pairs: ``torchrun --nproc-per-node N -m lightrft.cli.train_dpo --pretrain ... --train_data ...``."""
from collections.abc import Sequence

from lightrft.config.cli import parse_config, ParsedConfig
from lightrft.config.preference_schema import DPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
    train(
        parse_config(argv, prog="lightrft dpo", tree=DPOConfig,
                     description="Training on pairs of a better and a worse answer: DPO and its relatives."))


def train(parsed: ParsedConfig, exits: bool = True) -> None:
    """Train with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.trainer.dpo_trainer import DPOTrainer
    from lightrft.trainer.offline_trainer import train_rows
    train_rows(parsed, exits, DPOTrainer)


if __name__ == "__main__":
    main()
