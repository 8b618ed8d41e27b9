"""Batch inference: ``lightrft generate --pretrain MODEL --prompt_data DATA --output_path OUT.jsonl``."""
from collections.abc import Sequence
from functools import partial

from lightrft.cli.command_line import parse_command
from lightrft.config.cli import ParsedConfig
from lightrft.config.generate_schema import GenerateConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
    generate(
        parse_command(argv, "lightrft generate",
                      "Answer many prompts, score the responses and make training rows of them.", GenerateConfig))


def generate(parsed: ParsedConfig, exits: bool = True) -> None:
    """Generate with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.inference.batch import plan, run
    from lightrft.trainer.session import training_session
    from lightrft.trainer.trial import TrialContext
    with training_session(parsed, exits, TrialContext(rehearse=partial(plan, parsed.config))) as session:
        run(parsed.config, session.strategy)


if __name__ == "__main__":
    main()
