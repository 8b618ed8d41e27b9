"""A chat in the terminal: ``lightrft chat --pretrain MODEL``; ``MODEL`` may be a checkpoint of a run, too."""
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lightrft.cli.command_line import parse_command
from lightrft.config.cli import exit_on_config_error, ParsedConfig
from lightrft.config.inference_schema import ChatConfig

if TYPE_CHECKING:
    from lightrft.strategy.base import StrategyBase
    from lightrft.trainer.prompt_trial import ReadPrompts


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
    parsed = parse_command(argv, "lightrft chat", "Talk to a model: a line is a message; /help shows the commands.",
                           ChatConfig)
    with exported(parsed):
        chat(parsed)


@contextmanager
def exported(parsed: ParsedConfig) -> Iterator[None]:
    """Export the model of a checkpoint to a folder that lasts as long as the chat."""
    path = Path(parsed.config.model.pretrain or "")
    if not parsed.config.model.pretrain or not path.is_dir() or (path / "config.json").is_file():
        yield
        return
    from lightrft.cli.export import export
    with TemporaryDirectory() as folder:
        with exit_on_config_error("lightrft chat"):
            export(path, Path(folder) / "model")
        parsed.config.model.pretrain = str(Path(folder) / "model")
        yield


def chat(parsed: ParsedConfig) -> None:
    """Talk with parsed options, on stdin and stdout."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.inference.conversation import Conversation, HELP, talk
    from lightrft.inference.loading import LoadedModel
    from lightrft.trainer.session import training_session
    from lightrft.trainer.trial import TrialContext
    opened = partial(LoadedModel.open, parsed.config.as_config(),
                     repetition_penalty=parsed.config.engine.repetition_penalty)

    def rehearse(strategy: "StrategyBase", reads: Sequence["ReadPrompts"]) -> None:
        model = opened(strategy)
        Conversation.check(model)
        model.prepare()

    with training_session(parsed, trial=TrialContext(rehearse=rehearse)) as session:
        model = opened(session.strategy)
        Conversation.check(model)
        engine = model.start()
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # talk() refuses a line that is not UTF-8
        shown = f"{HELP}\n" if sys.stdin.isatty() else ""
        sys.stdout.write(shown)

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        talk(Conversation(model, engine, parsed.config.seed), sys.stdin, write, "> " if shown else "")
        engine.shutdown()
        if model.environment is not None:
            model.environment.shutdown()


if __name__ == "__main__":
    main()
