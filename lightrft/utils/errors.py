"""Errors that the user can fix, reported in one line, and a context manager around foreign code."""
import errno
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

from lightrft.utils.logging import get_logger

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# set by torchrun, for each rank: the error that it reports last; only the rank that found the error uses it
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PATIENCE_S = 10.0  # ranks start within seconds of each other


class ExpectedError(Exception):
    """Foreseen end of a run: the message names the problem and the remedy. Every other exception is a bug and is shown
    with its traceback.

    Attributes:
        exit_code: of the process.
    """
    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows (IPython calls this method): one line, as on the command line."""
        return [f"{type(self).__name__}: {self}"]


class UserError(ExpectedError, ValueError):
    """Options, data, models, rewards or checkpoints that cannot be used."""
    exit_code = 2


def end_in_one_line() -> None:
    """Let an expected error that this program does not catch end it in one line and with its exit code, in place of a
    traceback. A session at a prompt goes on, and debuggers, which have hooks of their own, show it their way."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _one_line


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ExpectedError):
        sys.__excepthook__(kind, error, trace)
        return
    if at_prompt():
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {error}\n")
    raise SystemExit(error.exit_code)


def at_prompt() -> bool:
    """Return True if this program is a prompt (REPL), or becomes one after its end: ``python -i``, PYTHONINSPECT."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect) or bool(os.environ.get("PYTHONINSPECT"))


def install_command(extra: str) -> str:
    """The command that installs an extra; the name ``lightrft`` on the public index is another distribution."""
    flag = " --no-build-isolation" if extra == "flash-attn" else ""  # it is built against the torch that is there
    return f"pip install{flag} -e '.[{extra}]' in the checkout of lightrft"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type; a heading (it ends with a colon, as that of torch about
    weights of other sizes) comes with the line below it."""
    heading, *lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{heading} {lines[0].strip()}" if lines and heading.endswith(":") else heading


def did_you_mean(name: Any, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return `` (did you mean x?)`` for the nearest known name, written with ``prefix``, or an empty string."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def meant_path(path: Path) -> str:
    """Return `` (did you mean x?)`` for an absent path: each part that is absent is the nearest name in its folder. An
    empty string if one has no near name."""
    here = Path(path.anchor)
    for part in path.parts[len(here.parts):]:
        names = [part] if (here / part).exists() else get_close_matches(part, _names_in(here), n=1)
        if not names:
            return ""
        here /= names[0]
    return f" (did you mean {here.name if here.parent == path.parent else here}?)"


def _names_in(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


@contextmanager
def disk_full_is_expected(folder: str) -> Iterator[None]:
    """Turn an ``OSError`` of a full disk into an :class:`ExpectedError` that names ``folder`` and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise ExpectedError(f"cannot write to {folder}: {error}. Make room; --load_checkpoint resumes from the "
                            "newest checkpoint") from error


@contextmanager
def absent_packages_are_expected() -> Iterator[None]:
    """Turn the failed import of a package that lightrft requires into a :class:`UserError` with the remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _required_modules():
            raise
        raise UserError(f"the package {name} is not installed; run: pip install -e . in the checkout of lightrft") \
            from error


def _required_modules() -> set[str]:
    """Return the modules of the distributions that lightrft requires without an extra; none if it is not installed."""
    from importlib.metadata import PackageNotFoundError, requires  # a fifth of the start of a worker, which needs none
    with suppress(PackageNotFoundError):
        needed = [text for text in requires("lightrft") or [] if "extra ==" not in text]
        names = [re.split(r"[^\w-]", text)[0].lower().replace("-", "_") for text in needed]
        return {*names, *(name.removeprefix("py") for name in names)}  # pyyaml has yaml
    return set()


@contextmanager
def optional_output(what: str) -> Iterator[None]:
    """Turn an ``OSError`` into a warning: a picture or a page is no reason to end a run."""
    try:
        yield
    except OSError as error:
        get_logger().warning(f"could not write {what}: {error}. The run continues without it")


class CaptureException:
    """Context manager around foreign code: any exception ends the block and is stored in ``cause``."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None

    def __enter__(self) -> "CaptureException":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        self.cause = error
        return error is not None

    @property
    def text(self) -> str:
        """The formatted traceback; empty without an exception."""
        return "".join(traceback.format_exception(self.cause)) if self.cause is not None else ""

    def text_below(self, *files: str) -> str:
        """Format the traceback without the outer frames of ``files`` (or folders) and of the import system, which
        called the foreign code; with them if there are no others."""
        trace = self.cause.__traceback__ if self.cause is not None else None
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*files, "<frozen ")):
            trace = trace.tb_next
        if self.cause is None or trace is None:
            return self.text
        return "".join(traceback.format_exception(type(self.cause), self.cause, trace))


def leave_error(text: str, speaks: bool = True, ended: Callable[[], bool] = lambda: False) -> bool:
    """Leave ``text`` for the end of torchrun's report, which names it as the cause of the failure.

    Args:
        speaks: this rank reports the error. Another one waits for torchrun to end it, and leaves the text if that does
            not happen, because the rank that speaks belongs to another machine.
        ended: returns True once torchrun's signal has arrived, for a process that does not end by it.

    Returns:
        False if this process was not started by torchrun: then nobody else prints the text.
    """
    path = os.environ.get(ERROR_FILE)
    if path and (speaks or not _is_ended(ended)):
        error = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": error}), encoding="utf-8")
    return bool(path)


def _is_ended(ended: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.05)
    return ended()
