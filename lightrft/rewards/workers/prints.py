"""Show what the code of a user prints in a worker, as labelled lines on standard error, where the trainer logs."""
import io
import os
import sys
import threading
from typing import Any

MOST_LINES = 1000  # of a worker
MOST_BYTES = 1000  # of a line


def label_prints(kind: str) -> None:
    """Let what this process prints come after ``[kind PROCESS]``, and what its children print go to standard error."""
    os.dup2(2, 1)
    sys.stdout = io.TextIOWrapper(LabelledLines(f"[{kind} {os.getpid()}]"), "utf-8", "replace", write_through=True)


class LabelledLines(io.RawIOBase):
    """Binary stream whose lines go to standard error with a label: each in one piece, whichever thread prints it."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label, self.left, self._begun = label.encode(), MOST_LINES, threading.local()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write the lines that are complete."""
        *lines, rest = (getattr(self._begun, "line", b"") + bytes(data)).split(b"\n")
        self._begun.line = rest[:MOST_BYTES + 1]
        for line in lines:
            self._show(line)
        return len(data)

    def _show(self, line: bytes) -> None:
        """Show one of the first :data:`MOST_LINES` lines, up to :data:`MOST_BYTES` of it."""
        self.left -= 1
        if self.left >= 0:
            os.write(2, b"%s %s%s\n" % (self.label, line[:MOST_BYTES], b" ..." * (len(line) > MOST_BYTES)))
        if self.left == 0:
            os.write(2, b"%s has printed %d lines: further ones are left out\n" % (self.label, MOST_LINES))
