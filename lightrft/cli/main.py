"""The command ``lightrft``: ``lightrft train | sft | generate ...``; ``--nproc 8`` starts a process per GPU."""
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from lightrft import __version__
from lightrft.cli.command_line import check_command
from lightrft.cli.foreign_commands import unknown_command
from lightrft.cli.offline import OFFLINE
from lightrft.utils.launcher import share_cores

COMMANDS = {
    "train": ("lightrft.cli.train", "reinforcement fine-tuning"),
    **{name: (command.module, command.summary) for name, command in OFFLINE.items()},
    "generate": ("lightrft.cli.generate", "batch inference: responses, scores and training rows"),
    "evaluate": ("lightrft.cli.evaluate", "pass@k, avg@k and maj@k of models on the same prompts"),
    "serve_rm": ("lightrft.cli.serve_rm", "score texts with reward models, over HTTP"),
    "chat": ("lightrft.cli.chat", "talk to a model in the terminal"),
    "export": ("lightrft.cli.export", "turn a checkpoint into a Hugging Face model"),
    "convert": ("lightrft.cli.convert", "the same for checkpoints of DeepSpeed and DCP too"),
    "merge_lora": ("lightrft.cli.merge_lora", "merge a LoRA adapter into its model"),
    "report": ("lightrft.cli.report", "write the report of a run again"),
    "doctor": ("lightrft.cli.doctor", "check the machine, the packages and a planned run"),
}
UNCHECKED = ("export", "convert", "merge_lora", "report", "doctor")  # they read no options of a run
USAGE = "usage: lightrft COMMAND [--nproc N] [--option value ...]\n\n" + "".join(
    f"  {name:<10} {text}\n" for name, (_, text) in COMMANDS.items()) + """
  --nproc N  start N processes on this machine, one per GPU
             (several machines: torchrun -m lightrft.cli.train)
  --version  print the version

lightrft COMMAND --help shows the options that most people set; --help all,
--help GROUP and --help OPTION show others.
"""


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run the command line; return its exit code."""
    ranks, words = take_nproc(list(sys.argv[1:] if argv is None else argv))
    name = words.pop(0) if words else ""
    if name == "help" and words:
        name, words = words[0], ["--help", *words[1:]]
    if name in ("", "-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    if name == "--version":
        sys.stdout.write(f"lightrft {__version__}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"lightrft: error: {unknown_command(name, COMMANDS)}\n"
                         "See lightrft --help for the commands.\n")
        return 2
    module = COMMANDS[name][0]
    if not ranks or {"-h", "--help"}.intersection(words):
        return import_module(module).main(words)
    share_cores(int(ranks), os.environ)
    if "--dry_run" in words:
        with as_first_of(ranks):
            return import_module(module).main(words)
    if name not in UNCHECKED:
        with as_first_of(ranks):
            check_command(import_module(module).main, words)
    return launch(ranks, module, words)


def take_nproc(words: list[str]) -> tuple[str, list[str]]:
    """Return the value of ``--nproc`` (empty without it), and the other words."""
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--nproc":
            value = value if equals else "".join(words[i + 1:i + 2])
            if not value.isdigit() or not int(value):
                sys.stderr.write(f"lightrft: error: --nproc {value}: expected the number of processes, such as 8\n")
                raise SystemExit(2)
            return value, words[:i] + words[i + (1 if equals else 2):]
    return "", words


@contextmanager
def as_first_of(ranks: str) -> Iterator[None]:
    """Let this process be rank 0 of ``ranks``: a plan, or a check of the words, talks to no other rank."""
    before = dict(os.environ)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch(ranks: str, module: str, words: list[str]) -> int:
    """Run ``python -m module`` on ``ranks`` processes, as ``torchrun --standalone`` does; return the exit code.

    Of torchrun's report only the error that a rank has left for it is printed. A signal to this process goes to the
    ranks, which save and end.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={ranks}", "-m", module, *words]))
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        if isinstance(failure.message, dict):
            said = failure.message["message"]
            sys.stderr.write(said if "error: " in said else f"lightrft: error: {said}")
            sys.stderr.write("\n")
        return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
