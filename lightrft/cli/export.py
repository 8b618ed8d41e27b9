"""Turn a checkpoint into a Hugging Face model: ``lightrft export CHECKPOINT OUT``."""
import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightrft.cli.offline import OFFLINE, OfflineCommand
from lightrft.config.cli import exit_on_config_error
from lightrft.config.schema import Config, StrategyConfig
from lightrft.config.tree import build, options
from lightrft.utils.errors import meant_path, UserError

TRAINED: dict[type, OfflineCommand] = {command.tree: command for command in OFFLINE.values()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    write_model(
        "lightrft export", export, "a checkpoint such as runs/a/checkpoints/step_000050; or the folder of the "
        "checkpoints or of the run, whose newest complete checkpoint is taken",
        "the model that the run started from, if it is not where it was then", argv)


def write_model(prog: str, work: Callable[[Path, Path, str], None], checkpoint: str, pretrain: str,
                argv: Sequence[str] | None) -> None:
    """Run a command that writes the model of a checkpoint, with the help texts of its words."""
    parser = argparse.ArgumentParser(prog=prog, description="Turn a checkpoint into a Hugging Face model.")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=checkpoint)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the model; it must not exist or be empty")
    parser.add_argument("--pretrain", default="", metavar="MODEL", help=pretrain)
    words = parser.parse_args(argv)
    with exit_on_config_error(prog):
        check_empty(words.out)
        if not words.checkpoint.exists():
            raise UserError(f"{words.checkpoint}: no such folder{meant_path(words.checkpoint)}; give one such as "
                            "runs/a/checkpoints/step_000050")
        work(words.checkpoint, words.out, words.pretrain)
    print(f"model written: {words.out}")


def export(checkpoint: Path, out: Path, pretrain: str = "") -> None:
    """Write the policy or reward model of a checkpoint to ``out``, with LoRA adapters merged, tokenizer, model card.

    Args:
        checkpoint: a step folder, a folder of them, or the folder of a run.
        pretrain: folder or hub id of the model that the run started from; empty: as in its options.

    Raises:
        UserError: there is no complete checkpoint, the model does not fit it, or ``out`` is not empty.
    """
    from lightrft.models.loader import load_actor
    from lightrft.models.tokenizer import load_tokenizer
    from lightrft.strategy.checkpoint import CheckpointManager, read_global
    from lightrft.strategy.checkpoint_folders import marker
    from lightrft.strategy.strategy import get_strategy
    from lightrft.trainer.run_log import RunLog
    path = _step_folder(checkpoint)
    check_empty(out)
    saved = read_global(path)
    config = _config(saved["options"], pretrain)
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    command = TRAINED.get(type(config))  # None: of reinforcement learning
    actor = strategy.prepare(
        partial(command.trainer_class().load, config) if command else partial(load_actor, config.model))
    manager = CheckpointManager(strategy, path.parent)
    manager.load(path, {"actor": actor})
    tokenizer = load_tokenizer(config.model.pretrain, config.data.chat_template)
    if command:
        command.trainer_class().describe(actor.model, tokenizer, saved)
    strategy.save_model(actor, out)
    log = RunLog(config, strategy)
    info = marker(path)
    if (path.parents[1] / "metrics.jsonl").is_file():  # the run may have moved
        log.folder = path.parents[1]
    log.model_files(out, tokenizer, info["step"], info["metrics"])
    strategy.teardown()


def check_empty(out: Path) -> None:
    """Raise an error if a model cannot be written to ``out`` without touching what is there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; name a new folder")


def _step_folder(checkpoint: Path) -> Path:
    """Return the complete checkpoint that ``checkpoint`` is, or the newest one below it."""
    from lightrft.strategy.checkpoint_folders import fault, MARKER, newest
    if (checkpoint / MARKER).exists() or checkpoint.name.startswith("step_"):
        if reason := fault(checkpoint):
            raise UserError(f"{checkpoint} is not a complete checkpoint: {reason}")
        return checkpoint
    found = newest(checkpoint) or newest(checkpoint / "checkpoints")
    if found is None:
        exported = checkpoint / "hf"
        raise UserError(f"{checkpoint}: no complete checkpoint is there; give a folder such as "
                        "runs/a/checkpoints/step_000050" +
                        (f", or use the model {exported}" if (exported / "config.json").is_file() else ""))
    return found


def _config(saved: dict[str, Any], pretrain: str) -> Any:
    """Build the tree of the run, the one most like the options in its checkpoint; this version may not know all.

    Liger's kernels are left out: the export computes nothing, and need not run on a GPU as the run did.
    """
    tree = min((Config, *TRAINED), key=lambda tree: len(options(tree).keys() ^ saved.keys()))
    known = {name: value for name, value in saved.items() if name in options(tree)}
    return build(tree, known | {"use_liger": False} | ({"pretrain": pretrain} if pretrain else {}))


if __name__ == "__main__":
    main()
