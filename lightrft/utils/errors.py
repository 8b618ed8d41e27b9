"""Errors that the user can fix, reported in one line, and a context manager around foreign code."""
import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from lightrft.utils.logging import get_logger

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ExpectedError(Exception):
    """Foreseen end of a run: the message names the problem and the remedy. Every other exception is a bug and is shown
    with its traceback.

    Attributes:
        exit_code: of the process.
    """
    exit_code = 1


class UserError(ExpectedError, ValueError):
    """Options, data, models, rewards or checkpoints that cannot be used."""
    exit_code = 2


def install_command(extra: str) -> str:
    """The command that installs an extra; the name ``lightrft`` on the public index is another distribution."""
    return f"pip install -e '.[{extra}]' in the checkout of lightrft"


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
