"""Rewards of a judge: the right answer, told apart by the place of the better candidate, and reasons before it."""
import re
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FORM = re.compile(r"\s*<think>[^<]*\S[^<]*</think>\s*<answer>[^<]*</answer>\s*")


def accuracy(data_source: str, solution_str: str, ground_truth: str,
             extra_info: dict[str, Any] | None = None) -> dict[str, float]:
    """Score 1 if the last ``<answer>`` is exactly the right one; also as the metric of the place."""
    said = ANSWER.findall(solution_str)
    right = float(bool(said) and said[-1].strip() == ground_truth)
    return {"score": right, data_source.rpartition("/")[2]: right}


def form(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
    """Score 1 for one ``<think>`` with reasons, and one ``<answer>`` behind it."""
    return float(FORM.fullmatch(solution_str) is not None)
