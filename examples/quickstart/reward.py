"""The quickstart's reward: 1 for the exact answer, else 0. The share of right carries is reported, never rewarded."""
import re

ANSWER = re.compile(r"\\boxed\{(\d+)\}")
COLUMN = re.compile(r"(\d)\+(\d)\+(\d)=(\d\d)")
WIDTH = 3  # columns of a problem


def exact_answer(response: str, reference: str) -> float:
    """Return 1.0 if the last boxed number of ``response`` equals ``reference``, else 0.0."""
    boxed = ANSWER.findall(response)
    return float(bool(boxed) and boxed[-1].lstrip("0") == str(reference).lstrip("0"))


def carry_accuracy(response: str) -> float:
    """Return the share of columns after the first whose carry is the previous tens digit; a missing one counts as 0."""
    columns = COLUMN.findall(response)
    right = sum(carry == before[3][0] for before, (_, _, carry, _) in zip(columns, columns[1:]))
    return right / max(WIDTH - 1, len(columns) - 1)


def accuracy(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """Score one response, with verl's signature: ``score`` is the reward, every other key becomes a metric."""
    return {"score": exact_answer(solution_str, ground_truth), "carries": carry_accuracy(solution_str)}
