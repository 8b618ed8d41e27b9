"""Printed blocks of the documents, and a folder in which their commands run as they are printed."""
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.run import parse_args

from lightrft.cli import main as lightrft_command
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(__file__).parents[3]
SHOWN = ("lightrft", "examples", "benchmarks", "docs", "constraints", "Makefile", "setup.py")
_PYTHON = """#!/bin/sh
if [ "$RECORD" ] && [ "$1 $2" = "-m torch.distributed.run" ]; then shift 2; printf '%s\\n' "$@" > "$RECORD"; exit; fi
exec {python} "$@"
"""
PROGRAMS = {
    "python": _PYTHON, "python3": _PYTHON, "lightrft": '#!/bin/sh\nexec {python} -m lightrft.cli.main "$@"\n',
    "torchrun": '#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n', "tensorboard":
    '#!/bin/sh\nexec {python} -m tensorboard.main "$@"\n'
}


@dataclass(frozen=True)
class Block:
    """One block of a page: a fence with its language, or lines that are indented like code ("")."""
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"


def pages() -> list[str]:
    """List the documents: README, the docs and the READMEs of the examples; generated pages are left out."""
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "algorithms").glob("*.md"),
             *(ROOT / "examples").glob("**/README.md")]  # yapf: disable
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order."""
    lines, language, start, before, opening = text.splitlines(), None, 0, "", ""
    for number, line in enumerate(lines, 1):
        fence = re.match(r"\s*(```+|~~~+)(.*)", line)
        if fence and language is None:
            opening, language, start = fence[1], fence[2].strip(), number
        elif fence and not fence[2] and fence[1].startswith(opening):  # a longer fence holds shorter ones
            yield Block(page, start, language or "", "".join(each + "\n" for each in lines[start:number - 1]))
            language = None
        elif language is None and line.startswith("    ") and not before.strip():
            yield Block(page, number, "", line)
        before = line


def commands(text: str) -> list[str]:
    """Split a block of shell into its commands; lines that a backslash continues are joined, comments are dropped."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    kept = (re.sub(r"\s+# .*|^# .*", "", line).strip() for line in lines)
    return [command for line in kept for command in line.split(" && ") if command]


@dataclass(frozen=True)
class Program:
    """A program of this project as a command starts it."""
    target: str  # a module, or the path of a script
    words: list[str]
    ranks: int = 1
    nodes: int = 1

    @classmethod
    def of(cls, words: list[str]) -> "Program":
        """Read the words of a command, as its launcher does."""
        first, rest = words[0], words[1:]
        if first == "torchrun":
            found = parse_args(rest)
            return cls(found.training_script, found.training_script_args, int(found.nproc_per_node),
                       int(found.nnodes.split(":")[-1]))
        if first == "lightrft":
            ranks, rest = lightrft_command.take_nproc(rest)
            return cls(lightrft_command.COMMANDS[rest[0]][0], rest[1:], int(ranks or 1))
        return cls(rest[1], rest[2:]) if rest[0] == "-m" else cls(rest[0], rest[1:])

    @property
    def runs_here(self) -> bool:
        """Return True if a computer with two cores, no GPU and no network can run it."""
        return self.ranks * self.nodes <= 2 and not any("://" in word for word in self.words)

    def plan(self) -> None:
        """Make its dry run, for as many GPUs as it has ranks."""
        self.run([*self.words, "--dry_run", "--plan_gpus", f"{self.nodes}x{self.ranks}xH100"])

    def run(self, words: list[str], codes: tuple[int, ...] = (0, )) -> None:
        """Run it in this process, on one rank.

        Raises:
            AssertionError: it ended with none of the exit ``codes``.
        """
        try:
            code = self._main(words) or 0
        except SystemExit as ended:
            code = ended.code or 0
        assert code in codes, f"exit code {code}: {self.target} {shlex.join(words)}"

    def _main(self, words: list[str]) -> Any:
        if not self.target.endswith(".py"):
            return import_module(self.target).main(words)
        here = [str(Path(self.target).resolve().parent), *sys.path]  # as Python starts a script
        with mock.patch.object(sys, "argv", [self.target, *words]), mock.patch.object(sys, "path", here):
            return runpy.run_path(self.target, run_name="__main__") and 0


class Workplace:
    """A folder that looks like a checkout, in which shell commands find this Python and a home of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.words = folder, folder / "bin", folder / "words.txt"
        for path in (*map(ROOT.joinpath, SHOWN), *ROOT.glob("requirements*.txt")):
            (folder / path.name).symlink_to(path)
        (folder / "home").mkdir()
        self.bin.mkdir()
        for name, text in PROGRAMS.items():
            (self.bin / name).write_text(text.format(python=warm_python()), encoding="utf-8")
            (self.bin / name).chmod(0o755)

    def shell(self, command: str, records: bool = False, said: str = "") -> str:
        """Run a command in bash to its end, and return what it printed.

        Args:
            records: write the words for torchrun to ``words`` in place of starting ranks.
            said: its input.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(["bash", "-ec", command], cwd=self.folder, env=self._environ(records), text=True,
                              timeout=250, input=said, capture_output=True)  # yapf: disable
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    @contextmanager
    def server(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in bash until Ctrl-C, after which it has to end well.

        A shell that runs the tests in the background has them ignore SIGINT, and so would the command.
        """
        process = subprocess.Popen(["bash", "-ec", f"exec {command}"], cwd=self.folder, env=self._environ(),
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, command
        finally:
            process.kill()

    def _environ(self, records: bool = False) -> dict[str, str]:
        own = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT),
               "PYTHON": str(self.bin / "python"), "RECORD": str(self.words) if records else ""}  # yapf: disable
        rest = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "RECORD"))}
        return rest | warm_environ(nested=True) | own

    def script(self, command: str) -> None:
        """Run a script that starts ranks; plan what it starts on its GPUs if the command does not say ``NPROC``."""
        self.shell(command, records=True)
        program = Program.of(["torchrun", *self.words.read_text(encoding="utf-8").splitlines()])
        if "NPROC=" in command:
            self.shell(command)
        else:
            program.plan()
