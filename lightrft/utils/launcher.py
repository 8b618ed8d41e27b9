"""The error that torchrun reports last: each rank has a file for it, and only the rank that found the error uses it."""
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun, for each rank
PATIENCE_S = 10.0  # ranks start within seconds of each other


def leave_error(text: str, speaks: bool = True, ended: Callable[[], bool] = lambda: False) -> bool:
    """Leave ``text`` for the end of torchrun's report, which names it as the cause of the failure.

    Args:
        speaks: this rank reports the error. Another one waits for torchrun to end it, and leaves the text if that does
            not happen, because the rank that speaks belongs to another machine.
        ended: returns True once torchrun's signal has arrived, for a process that does not end by it.

    Returns:
        False if this process was not started by torchrun: then nobody else prints the text.
    """
    path = os.environ.get(FILE)
    if path and (speaks or not _is_ended(ended)):
        error = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": error}), encoding="utf-8")
    return bool(path)


def _is_ended(ended: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.05)
    return ended()
