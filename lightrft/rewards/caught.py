"""Fence around code that is not ours."""
import traceback
from types import TracebackType


class Caught:
    """A ``with`` block around foreign code: whatever it raises ends the block, and is kept in ``cause``."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None

    def __enter__(self) -> "Caught":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        self.cause = error
        return error is not None

    @property
    def text(self) -> str:
        """The traceback, for people."""
        return "".join(traceback.format_exception(self.cause)) if self.cause is not None else ""
