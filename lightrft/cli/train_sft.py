"""Supervised fine-tuning: ``torchrun --nproc-per-node N -m lightrft.cli.train_sft --pretrain ... --train_data ...``."""
from collections.abc import Sequence
from functools import partial

from lightrft.config.cli import parse_config, ParsedConfig
from lightrft.config.sft_schema import SFTConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the SFT tree, ``--config`` and ``--dry_run``."""
    train(
        parse_config(argv, prog="python -m lightrft.cli.train_sft", tree=SFTConfig,
                     description="Supervised fine-tuning on conversations; the loss covers assistant turns only."))


def train(parsed: ParsedConfig, exits: bool = True) -> None:
    """Train with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.datasets.sft_dataset import SFTDataset
    from lightrft.models.loader import check_context, load_actor, load_tokenizer
    from lightrft.trainer.session import training_session
    from lightrft.trainer.sft_trainer import SFTTrainer
    config, data = parsed.config, parsed.config.data.as_data_config()
    with training_session(parsed, exits) as session:
        check_context(config.model.pretrain, max_len=config.data.max_len)
        tokenizer = load_tokenizer(config.model.pretrain, data.chat_template)
        rows = SFTDataset(data, tokenizer, config.data.max_len)
        held_out = SFTDataset(data, tokenizer, config.data.max_len, "eval") if data.eval_data else []
        actor = partial(load_actor, config.model, deferred=True)  # loaded when the strategy prepares it
        SFTTrainer(config, session.strategy, actor, tokenizer, rows, held_out, session.timer).fit()


if __name__ == "__main__":
    main()
