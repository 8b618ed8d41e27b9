"""Keeps the training rows of a wanted difficulty: a number that was measured before, such as a pass rate."""
import math

from lightrft.config.options import finite
from lightrft.config.schema import DataConfig
from lightrft.datasets.loading import DataError, Row, Rows
from lightrft.datasets.records import first_value
from lightrft.utils.logging import get_logger


def difficulty(row: Row, key: str, where: str) -> float:
    """The number in column ``key``, else in ``extra_info[key]``. ``where`` names the row in messages.

    Raises:
        DataError: there is none, or it is no number.
    """
    found = first_value((row, key), (row.get("extra_info"), key))
    number = finite(found)
    if number is None:
        told = "the row has none" if found is None else f"{found!r} is not a number"
        raise DataError(f"{where}: --difficulty_key {key}: {told}. Complete or remove the row, or drop the option")
    return number


def of_difficulty(parts: list[Rows], cfg: DataConfig) -> list[Rows]:
    """The rows from ``cfg.difficulty_min`` to ``cfg.difficulty_max``; the others are counted in the log.

    Raises:
        DataError: see :func:`difficulty`; also no row is left.
    """
    low = -math.inf if cfg.difficulty_min is None else cfg.difficulty_min
    high = math.inf if cfg.difficulty_max is None else cfg.difficulty_max
    values = [[difficulty(row, cfg.difficulty_key, rows.where(i)) for i, row in enumerate(rows.rows)] for rows in parts]
    kept = [rows.pick(i for i, value in enumerate(of) if low <= value <= high) for rows, of in zip(parts, values)]
    before, after, everything = sum(map(len, parts)), sum(map(len, kept)), [value for of in values for value in of]
    found = (
        f"{before - after} of {before} rows have a {cfg.difficulty_key} outside [{low:g}, {high:g}] (the smallest is "
        f"{min(everything):g}, the largest {max(everything):g})")
    if not after:
        raise DataError(f"{found}: nothing is left to train on. Change --difficulty_min or --difficulty_max")
    get_logger().info("%s: left out", found)
    return kept
