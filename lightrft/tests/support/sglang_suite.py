"""Program: pytest in a fork of the server that has imported SGLang. That server also forks the ranks of the tests, so
SGLang and what it needs are imported once, not in two processes. Words: those of pytest.

For an environment with SGLang; :mod:`lightrft.rollout.tests.test_sglang_engine` runs it there.
"""
import os
import sys
from multiprocessing import forkserver

SGLANG = ["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler", "lightrft.tests.support.sglang_forked"]
ENVIRON = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}  # as sglang/launch.py does; imports read both


def tests(words: list[str]) -> None:
    """Pytest as in a process of its own: its environment, and starts of schedulers as users have them."""
    import pytest

    from lightrft.tests.support import sglang_forked
    for name in ENVIRON:
        del os.environ[name]
    sglang_forked.undo()
    forkserver._forkserver.ensure_running = lambda: None  # a fork would start a server of its own
    sys.exit(int(pytest.main(words)))


def main() -> None:
    """Start the server, and the tests in a fork of it."""
    from lightrft.tests.support.launch import _CONTEXT, preload
    preload(*SGLANG)
    os.environ |= ENVIRON
    process = _CONTEXT.Process(target=tests, args=(sys.argv[1:], ))
    process.start()
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
