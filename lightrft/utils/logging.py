"""Logger of the library: everything on rank 0, warnings and errors elsewhere; lines never break a progress bar."""
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "lightrft"


class _Formatter(logging.Formatter):
    """Formats ``12:34:56 message``, with level above INFO and rank above 0; ``extra={"plain": True}`` adds nothing."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.__dict__.get("plain"):
            return text
        level = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        rank = f"[rank {os.environ['RANK']}] " if os.environ.get("RANK", "0") != "0" else ""
        return f"{self.formatTime(record, '%H:%M:%S')} {rank}{level}{text}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current ``sys.stderr``; an active tqdm bar is cleared for the line and redrawn below it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if "tqdm" not in sys.modules:
            super().emit(record)
            return
        with sys.modules["tqdm"].tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def get_logger() -> logging.Logger:
    """Return the logger of the library: level INFO on rank 0 (environment variable ``RANK``), WARNING on the others.

    ``LIGHTRFT_LOG_LEVEL`` (DEBUG, INFO, WARNING, ERROR) overrides the level of every rank.
    """
    logger = logging.getLogger(_NAME)
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler())
        logger.propagate = False
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about kernels for inference
    default = "INFO" if os.environ.get("RANK", "0") == "0" else "WARNING"
    level = os.environ.get("LIGHTRFT_LOG_LEVEL", default).upper()
    if logging.getLevelName(logger.level) != level:  # to set it empties a cache of every logger of the process
        logger.setLevel(level)
    return logger


@contextmanager
def silent() -> Iterator[None]:
    """Drop all that is logged below an error, of every library."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def each_line_once() -> Iterator[None]:
    """Let the library log a text once, such as the notice of a word that is typed twice."""
    logger, texts = get_logger(), set[str]()

    def new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return text not in texts and not texts.add(text)  # type: ignore[func-returns-value]

    logger.addFilter(new)
    try:
        yield
    finally:
        logger.removeFilter(new)


@contextmanager
def one_rank_warns(part: str) -> Iterator[None]:
    """Let a part of the library log warnings on rank 0 alone, while every rank does the same."""
    logger = logging.getLogger(f"{_NAME}.{part}")
    before = logger.level
    logger.setLevel(before if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def silent_logger() -> Iterator[None]:
    """Log nothing, while something is tried whose messages would be about the trial."""
    logger, parts = logging.getLogger(_NAME), logging.root.manager.loggerDict
    loggers = [logger, *(part for name, part in parts.items() if name.startswith(f"{_NAME}.")
                         and isinstance(part, logging.Logger))]  # yapf: disable
    before = [each.disabled for each in loggers]
    for each in loggers:
        each.disabled = True
    try:
        yield
    finally:
        for each, was in zip(loggers, before):
            each.disabled = was


def warn_of_all(text: str) -> None:
    """Log, on rank 0 alone, a warning about options or data, which every rank finds."""
    if os.environ.get("RANK", "0") == "0":
        get_logger().warning(text)
