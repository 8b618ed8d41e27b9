"""A command ``python`` for scripts under test that starts in a moment: it is forked from the server of :mod:`launch`.

Everything else is as in a fresh process: arguments, environment, folder, files, signals and the exit code. Curves are
drawn with ``WARM_CURVES`` in the environment. A program that is not a module or a script, or whose environment differs
in what imports read, gets a fresh Python.
"""
import atexit
import gc
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Thread
from typing import Any

from lightrft.tests.support import growth
from lightrft.tests.support.launch import _CONTEXT, ROOT
from lightrft.utils.hub import read_cache_only

_AT_IMPORT = re.compile(r"CUDA|HF_|LD_|MKL|OMP_|TRANSFORMERS|PYTHON(?!PATH|_EXEC|$)|"
                        r"TORCH(?!ELASTIC|_ELASTIC|INDUCTOR|_NCCL)")  # torch itself sets the one of its inductor
_OF_PACKAGES = {"VLLM": "vllm", "SGLANG": "sglang"}  # read by an import which a program makes itself, or the server has
_SWITCHED = ("HF_HUB_OFFLINE", "PYTHONUNBUFFERED")  # those that _take can set to 1 after the imports
_CLIENT = Path(__file__).with_name("warm_client.py")


@cache
def warm_python() -> str:
    """Start to serve, once per process; the path of the command."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    Thread(target=_listen, args=(listener, ), daemon=True).start()
    command = folder / "python"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -SEs {_CLIENT} {folder}/socket {sys.executable} \"$@\"\n")
    command.chmod(0o755)
    atexit.register(lambda: [path.unlink(missing_ok=True) for path in (command, folder / "socket")] and folder.rmdir())
    return str(command)


def warm_environ(nested: bool = False) -> dict[str, str]:
    """Variables under which scripts and torchrun take this Python; if ``nested``, for their ``sys.executable`` too."""
    return {"PYTHON": warm_python(), "PYTHON_EXEC": warm_python()} | ({"WARM_NESTED": "1"} if nested else {})


def server_environ() -> dict[str, str]:
    """The environment in which the server has imported the library; engines may have changed that of this process."""
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_send_environ, args=(there, ))
    process.start()
    found: dict[str, str] = here.recv()
    process.join()
    return found


def _send_environ(end: Any) -> None:
    end.send(dict(os.environ))


def _listen(listener: socket.socket) -> None:
    while True:
        Thread(target=_serve, args=(listener.accept()[0], ), daemon=True).start()


def _serve(client: socket.socket) -> None:
    """One program: start it, report its process id, then its exit code; without its client it is killed."""
    with client:
        said, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
        size = int.from_bytes(said[:8], "big")
        while len(said) < 8 + size:
            said += client.recv(1 << 20)
        process = _CONTEXT.Process(target=_become, args=(json.loads(said[8:]), _Files(files)), daemon=True)
        process.start()
        for file in files:
            os.close(file)
        client.sendall(f"{process.pid}\n".encode())
        Thread(target=_kill_without, args=(client, process), daemon=True).start()
        process.join()
        with suppress(OSError):
            client.sendall(f"{process.exitcode}\n".encode())


def _kill_without(client: socket.socket, process: Any) -> None:
    with suppress(OSError):
        if client.recv(1) == b"" and process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)


class _Files:
    """Open files on their way to the new process."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, tuple(DupFd(number) for number in self.numbers)


def _arrived(*files: Any) -> list[int]:
    return [file.detach() for file in files]


def _become(asked: dict[str, Any], files: list[int]) -> None:
    """Become the process that ``python WORDS`` would be."""
    words, environ = asked["words"], asked["environ"]
    start = _flags(words)
    program = words[start:]
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(asked["folder"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else default)
    if not _can_run(program, environ):
        growth.add(Path(os.environ.get(growth.VARIABLE, os.devnull)), "cold starts")
        os.execve(sys.executable, [sys.executable, *words], environ)
    _take(environ, words[:start])
    os._exit(_code_of(program))


def _flags(words: list[str]) -> int:
    """Return how many words are flags that :func:`_take` knows: ``-u`` and ``-W ignore``."""
    count = 0
    while words[count:count + 1] == ["-u"] or words[count:count + 2] == ["-W", "ignore"]:
        count += 1 + (words[count] == "-W")
    return count


def _can_run(program: list[str], environ: dict[str, str]) -> bool:
    """Return True for a module or a script, in an environment in which imports do the same as in this process."""
    differ = {name for name in {*os.environ, *environ} if os.environ.get(name, "") != environ.get(name, "")}
    differ -= {name for name in _SWITCHED if environ.get(name) == "1"}
    known = program[0] == "-m" and len(program) > 1 or program[0].endswith(".py") if program else False
    return known and not any(map(_was_read, differ))


def _was_read(name: str) -> bool:
    """Return True for an environment variable that the imports of this process have read."""
    packages = [package for start, package in _OF_PACKAGES.items() if name.startswith(start)]
    return bool(_AT_IMPORT.match(name)) or any(package in sys.modules for package in packages)


def _take(environ: dict[str, str], flags: list[str]) -> None:
    """Set what an interpreter finds at its start."""
    gc.freeze()  # or it would search for garbage in what is imported already
    if "WARM_CURVES" not in environ:  # they take longer than a small run
        import_module("lightrft.trainer.run_log").plot_curve = lambda *args: None
    os.environ.clear()
    os.environ.update(environ)
    if environ.get("HF_HUB_OFFLINE") == "1":
        read_cache_only()
    if "WARM_NESTED" in environ:
        sys.executable = environ["PYTHON"]
    if "-u" in flags or environ.get("PYTHONUNBUFFERED") == "1":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if "-W" in flags:
        warnings.simplefilter("ignore")
    sys.stdin = open(0, closefd=False)
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children


def _code_of(words: list[str]) -> int:
    """Run a module or a script to its end, with what the interpreter does then; the exit code."""
    code = 0
    try:
        _run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        error = error.with_traceback(_beyond_this_file(error))
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF


def _beyond_this_file(error: BaseException) -> Any:
    """The traceback from the program on."""
    trace: Any = error.__traceback__
    while trace.tb_next and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _run(words: list[str]) -> None:
    first = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    own = [path for path in sys.path if "site-packages" in path or path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [first, *given, *own, str(ROOT)]
    sys.argv[:] = words[1:] if words[0] == "-m" else words
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
