"""The Python of scripts under test behaves as a fresh one, and has the library imported."""
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrft.tests.support.warm import server_environ, warm_environ, warm_python

PROGRAM = """import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv, sys.path[0], os.getcwd(), os.environ["GIVEN"], __name__, sys.stdin.read(), "torch" in sys.modules)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else "a reason")
"""


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    own = server_environ() | warm_environ() | {"GIVEN": "here"} | environ
    return subprocess.run([warm_python(), *words], cwd=folder, env=own, capture_output=True, text=True, input="typed")


def test_words_folder_environment_files_and_exit_code_are_those_asked_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for words, first in ((["program.py"], "program.py"), (["-u", "-m", "program"], f"{tmp_path}/program.py")):
        done = run(tmp_path, *words, "3")
        expected = f"{[first, '3']} {tmp_path} {tmp_path} here __main__ typed True\nat exit\n"
        assert (done.returncode, done.stdout, done.stderr) == (3, expected, "")
    assert (done := run(tmp_path, "program.py")).returncode == 1 and done.stderr == "a reason\n"


def test_a_fresh_python_starts_where_imports_would_differ(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for environ in ({"OMP_NUM_THREADS": "3"}, {"HF_HUB_OFFLINE": "1"}):
        assert "typed False" in run(tmp_path, "program.py", "0", **environ).stdout
    assert run(tmp_path, "-c", "import sys; print('torch' in sys.modules)").stdout == "False\n"


def test_an_error_has_the_traceback_of_the_program_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def fail():\n    1 / 0\nfail()\n")
    done = run(tmp_path, "program.py")
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[0] == "Traceback (most recent call last):" and "program.py" in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero" and done.stderr.count("File ") == 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Take SIGINT, which a shell that runs the tests in the background has them ignore, and their processes too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both_processes(number: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    command = subprocess.Popen([warm_python(), "program.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # yapf: disable
    assert command.stdout is not None
    pid = int(command.stdout.readline())
    assert pid != command.pid
    command.send_signal(number)
    command.communicate(timeout=60)  # ends when nobody holds the pipes
    assert command.returncode == -number
