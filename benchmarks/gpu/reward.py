"""Reward for random models: any text has one, and those of a group differ."""
import zlib


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Return a number in [0, 1) that only depends on the text."""
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
