"""Errors that the person who started the run can mend. They end a run with one line, without a traceback."""
import errno
from collections.abc import Iterator
from contextlib import contextmanager

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ExpectedError(Exception):
    """An end that was foreseen: the message says what is wrong and what helps; everything else is a bug, with its
    traceback.

    Attributes:
        exit_code: of the process.
    """
    exit_code = 1


class UserError(ExpectedError, ValueError):
    """Options, data, models, rewards or checkpoints that cannot be used."""
    exit_code = 2


@contextmanager
def disk_full_is_expected(folder: str) -> Iterator[None]:
    """Turn an ``OSError`` for lack of room into an :class:`ExpectedError` that names ``folder`` and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise ExpectedError(f"cannot write to {folder}: {error}. Make room; --load_checkpoint goes on from the "
                            "newest checkpoint") from error
