"""The Python of scripts under test behaves as a fresh one, and has the library imported."""
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrft.tests.support import growth
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
    for environ in ({"OMP_NUM_THREADS": "3"}, {"HF_HUB_OFFLINE": "0"}):
        assert "typed False" in run(tmp_path, "program.py", "0", **environ).stdout
    assert growth.counted_in(Path(os.environ[growth.VARIABLE]))["cold starts"] >= 2
    assert run(tmp_path, "-c", "import sys; print('torch' in sys.modules)").stdout == "False\n"


def test_variables_of_engines_that_are_not_imported_yet_are_taken(tmp_path: Path) -> None:
    """vLLM leaves some in a process in which it has run, and later tests of that process start programs."""
    (tmp_path / "program.py").write_text("import os, sys\nprint('torch' in sys.modules, os.environ['VLLM_A'])\n")
    assert run(tmp_path, "program.py", VLLM_A="b", SGLANG_A="c").stdout == "True b\n"


def test_code_on_the_command_line_keeps_the_files_it_is_given() -> None:
    """As a reward worker does, which a program starts with its own ``sys.executable``."""
    read, written = os.pipe()
    code = f"import os, sys; os.write({written}, b'arrived'); print(sys.executable)"
    done = subprocess.run([warm_python(), "-c", code], pass_fds=[written], capture_output=True, text=True)
    os.close(written)
    with open(read) as end:
        assert (end.read(), done.stdout) == ("arrived", f"{sys.executable}\n"), done


def test_a_program_without_the_hub_asks_it_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint('torch' in sys.modules)\n"
                                         "from huggingface_hub import hf_hub_download\nhf_hub_download('a/b', 'c')\n")
    done = run(tmp_path, "program.py", HF_HUB_OFFLINE="1")
    assert done.stdout == "True\n" and "LocalEntryNotFoundError" in done.stderr and "offline" in done.stderr, done


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
    sleeps = "while True:\n    time.sleep(0.1)\n"  # a signal just before one long sleep would not end it
    (tmp_path / "program.py").write_text(f"import os, time\nprint(os.getpid(), flush=True)\n{sleeps}")
    command = subprocess.Popen([warm_python(), "program.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # yapf: disable
    assert command.stdout is not None
    pid = int(command.stdout.readline())
    assert pid != command.pid
    command.send_signal(number)
    command.communicate(timeout=60)  # ends when nobody holds the pipes
    assert command.returncode == -number


def test_curves_are_drawn_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("from lightrft.trainer import run_log\nprint(run_log.plot_curve.__name__)\n")
    assert run(tmp_path, "program.py").stdout == "<lambda>\n"
    assert run(tmp_path, "program.py", WARM_CURVES="1").stdout == "plot_curve\n"
