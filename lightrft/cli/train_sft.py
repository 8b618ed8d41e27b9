"""Supervised fine-tuning: ``torchrun --nproc-per-node N -m lightrft.cli.train_sft --pretrain ... --train_data ...``."""
from collections.abc import Sequence

from lightrft.config.cli import parse_config, ParsedConfig
from lightrft.config.sft_schema import SFTConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the SFT tree, ``--config`` and ``--dry_run``."""
    train(
        parse_config(argv, prog="lightrft sft", tree=SFTConfig,
                     description="Supervised fine-tuning on conversations; the loss covers assistant turns only."))


def train(parsed: ParsedConfig, exits: bool = True) -> None:
    """Train with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.trainer.offline_trainer import train_rows
    from lightrft.trainer.sft_trainer import SFTTrainer
    train_rows(parsed, exits, SFTTrainer)


if __name__ == "__main__":
    main()
