"""Evaluation of models: ``lightrft evaluate --pretrain MODEL ... --eval_data DATA --n_samples 8 --temperature 1``."""
from collections.abc import Sequence
from functools import partial

from lightrft.cli.command_line import parse_command
from lightrft.config.cli import ParsedConfig
from lightrft.config.evaluate_schema import EvaluateConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
    evaluate(
        parse_command(argv, "lightrft evaluate",
                      "Measure pass@k, avg@k and maj@k of models on the same prompts, and compare them.",
                      EvaluateConfig))


def evaluate(parsed: ParsedConfig, exits: bool = True) -> None:
    """Evaluate with parsed options; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.inference import evaluation
    from lightrft.trainer.session import training_session
    from lightrft.trainer.trial import TrialContext
    trial = TrialContext(rehearse=partial(evaluation.plan, parsed.config))
    with training_session(parsed, exits, trial) as session:
        evaluation.evaluate(parsed.config, session.strategy)


if __name__ == "__main__":
    main()
