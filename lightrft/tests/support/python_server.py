"""Commands of Python, each in a fork of one process that has imported what all of them need.

    python -m lightrft.tests.support.python_server

reads one command per line from its standard input and prints the exit code of each. Of this library a fork imports
the files that are on its path when it starts: a test may change them between two commands.
"""
import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

_SHARED = ("torch.distributed.checkpoint", "torch.utils.tensorboard", "matplotlib.backends.backend_agg",
           "transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2", "pytest")


class PythonServer:
    """A process that runs commands of Python, one after the other.

    Args:
        tree: the folder whose packages are imported, and in which the commands run.
    """

    def __init__(self, tree: Path) -> None:
        self._log = tree.parent / f"{tree.name}.log"
        self._process = subprocess.Popen([sys.executable, "-m", __name__], cwd=tree, text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE,
                                         env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"})

    def call(self, *words: object) -> tuple[int, str]:
        """Run ``python WORDS`` to its end; return its exit code and what it printed."""
        assert self._process.stdin and self._process.stdout
        self._log.write_bytes(b"")
        self._process.stdin.write(json.dumps([str(self._log), *map(str, words)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, self._log.read_text(encoding="utf-8", errors="replace")

    def run(self, *words: object) -> str:
        """Run a command to its good end; return what it printed.

        Raises:
            AssertionError: it failed.
        """
        code, printed = self.call(*words)
        assert code == 0, printed[-8000:]
        return printed

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=10)


def _become(log: str, *words: str) -> None:
    """Run what ``python WORDS`` would run, with its output in the file ``log``."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    if words[0] == "-m":
        sys.argv[:], sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Import, then run the commands."""
    for name in _SHARED:
        import_module(name)
    gc.freeze()  # or each run would search what is imported for garbage
    for line in sys.stdin:
        process = multiprocessing.get_context("fork").Process(target=_become, args=json.loads(line))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    main()
