"""Rounds of answering, training and evaluating, which a killed call resumes: the driver of the loops in examples/.

    python examples/rounds.py --model MODEL --out runs/raft --rounds 3 --prompts 1000 \\
        --generate "--prompt_data train.jsonl --best_of_n 8 --score math --post_processor rs" \\
        --train "sft --learning_rate 1e-5" --evaluate "--eval_data test.jsonl --score math"

In each round the newest model answers prompts that no earlier round has seen (``lightrft generate``), trains on the
rows that were made of its answers (``lightrft sft``, ``dpo`` ...) and is evaluated (``lightrft evaluate``). OUT/round_N
has ``rows.jsonl``, ``trained/hf`` and ``evaluation/``; OUT has ``metrics.jsonl``, a row per round, and
``learning_curve.png``. The same command resumes in the command that was interrupted; rounds that are not trained yet
take other ``--train`` flags too.
"""
import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lightrft.utils.curve import draw, panels
from lightrft.utils.tables import accuracies, mean_rewards

SETTINGS = ("model", "prompts", "generate", "evaluate", "trained")  # what the files of every round depend on


class Step(NamedTuple):
    """A command of a round.

    Attributes:
        words: of its command line, after ``lightrft``.
        folder: of what it writes.
        product: its result in that folder. While that is unfinished there is something beside it that ends in
            ``.parts``, or it does not exist.
    """
    words: list[str]
    folder: Path
    product: str

    @property
    def done(self) -> bool:
        """True if the command has run to its end."""
        return (self.folder / self.product).exists() and not any(self.folder.glob("*.parts"))


def options() -> argparse.ArgumentParser:
    """Build the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="HF folder or hub id that the first round starts from")
    parser.add_argument("--out", type=Path, required=True, help="folder of all rounds")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; a later call may ask for more")
    parser.add_argument("--prompts", type=int, default=1000, help="prompts of a round")
    parser.add_argument("--nproc", type=int, default=1, help="processes of every command, one per GPU")
    parser.add_argument("--generate", required=True, help="flags of lightrft generate")
    parser.add_argument("--train", required=True, help="name and flags of the trainer, e.g. 'sft --learning_rate 1e-5'")
    parser.add_argument("--evaluate", required=True, help="flags of lightrft evaluate")
    parser.add_argument("--trained", default="", help="further flags of both, for models that a round has trained")
    return parser


def steps(args: argparse.Namespace) -> Iterator[Step]:
    """Yield the commands of all rounds in their order; the first evaluates the model itself."""
    model, further = args.model, []
    yield evaluation(args, 0, model, further)
    for number in range(1, args.rounds + 1):
        folder = args.out / f"round_{number}"
        rows, trained, (trainer, *flags) = folder / "rows.jsonl", folder / "trained", shlex.split(args.train)
        numbers = ["--iter", str(number - 1), "--rollout_batch_size", str(args.prompts), "--output_path", str(rows)]
        yield Step(["generate", "--pretrain", model, *numbers, *shlex.split(args.generate), *further], folder,
                   "rows.jsonl")
        resumed = ["--load_checkpoint"] if (trained / "checkpoints").exists() else []
        paths = ["--pretrain", model, "--train_data", str(rows), "--save_path", str(trained)]
        yield Step([trainer, *paths, *flags, *resumed], trained, "hf/README.md")
        model, further = str(trained / "hf"), shlex.split(args.trained)
        yield evaluation(args, number, model, further)


def evaluation(args: argparse.Namespace, number: int, model: str, further: list[str]) -> Step:
    """Return the evaluation of the model of a round."""
    folder = args.out / f"round_{number}" / "evaluation"
    words = ["evaluate", "--pretrain", model, "--output_path", str(folder), *shlex.split(args.evaluate), *further]
    return Step(words, folder, "results.jsonl")


def run(words: list[str], nproc: int, lock: int) -> int:
    """Run a command of ``lightrft`` to its end, and return its exit code.

    It is asked to stop as this process is (Ctrl-C reaches both), and saves. It keeps ``lock`` if this one is killed.
    """
    ranks = ["--nproc", str(nproc)] if nproc > 1 else []
    command = [sys.executable, "-m", "lightrft.cli.main", words[0], *ranks, *words[1:]]
    child = subprocess.Popen(command, pass_fds=[lock])
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    signal.signal(signal.SIGINT, lambda *_: None)
    return child.wait()


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the lock of ``folder``; end the program if another call, or a command of a killed one, has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{folder}: a command of another call is still running there; wait for it, or end it")
    try:
        yield lock
    finally:
        os.close(lock)


def check_settings(args: argparse.Namespace) -> None:
    """End the program if the folder has rounds with other settings; write them. The flags of training may change."""
    path, wanted = args.out / "settings.json", {name: getattr(args, name) for name in (*SETTINGS, "train")}
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else wanted
    others = [f"--{name} {wanted[name]!r} (was {found[name]!r})" for name in SETTINGS if wanted[name] != found[name]]
    if others:
        sys.exit(f"{args.out} holds rounds with other settings: {', '.join(others)}. Give another folder, or remove it")
    if wanted["train"] != found["train"]:
        print(f"rounds that are not trained yet: --train {wanted['train']!r} (was {found['train']!r})", flush=True)
    path.write_text(json.dumps(wanted, indent=1), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """Read a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measured(out: Path, number: int) -> dict[str, Any]:
    """Return the row of a round: held-out numbers of its model, and the mean reward of its answers in the next."""
    row: dict[str, Any] = {"step": number}
    found = read(out / f"round_{number}" / "evaluation" / "results.jsonl")
    for each in found:
        of_all = "all" if len({one["source"] for one in found}) == 1 else each["source"]
        name = f"eval/{of_all}/{each['metric']}"
        row[name] = each["value"]
        row |= {f"{name}/{edge}": each[edge] for edge in ("low", "high") if edge in each}
    summary = out / f"round_{number + 1}" / "rows.jsonl.summary.json"
    if summary.exists():
        row["reward/mean"] = json.loads(summary.read_text(encoding="utf-8")).get("reward mean")
    return row


def write_curve(out: Path, rounds: Iterable[int]) -> list[dict[str, Any]]:
    """Write ``metrics.jsonl`` and ``learning_curve.png``, and return the rows."""
    rows = [measured(out, number) for number in rounds]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    figure = draw(rows, panels(rows))
    for axes in figure.axes:
        axes.set_xlabel("round")
    figure.savefig(out / "learning_curve.png", format="png")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Render the rows of the rounds in Markdown, with the accuracy; a round without one: with the mean reward."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    columns = {"round": "step", "sampled reward": "reward/mean"}
    for name in (*accuracies(names), *mean_rewards(names))[:1]:
        columns |= {f"held-out {name.rpartition('/')[2]}": name, "from": f"{name}/low", "to": f"{name}/high"}
    cells = [[row.get(name) for name in columns.values()] for row in rows]
    texts = [[f"{cell:.3f}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row]
             for row in cells]  # yapf: disable
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(columns), ["---"] * len(columns), *texts])


def run_rounds(args: argparse.Namespace, lock: int) -> int:
    """Run the commands that are not done yet; return the exit code of the first one that fails, else 0."""
    for step in steps(args):
        if not step.done:
            print(f"{step.folder}: lightrft {step.words[0]}", flush=True)
            if code := run(step.words, args.nproc, lock):
                return code
            shutil.rmtree(step.folder / "checkpoints", ignore_errors=True)  # of no use once the model is written
    return 0


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    args = options().parse_args(argv)
    with locked(args.out) as lock:
        check_settings(args)
        code = run_rounds(args, lock)
        evaluated = [number for number in range(args.rounds + 1) if evaluation(args, number, args.model, []).done]
        if evaluated:
            print(table(write_curve(args.out, evaluated)))
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
