"""The reward of the counting tasks: 1 for the exact answer, else 0. The share of right rows is only reported."""
import re

ANSWER = re.compile(r"\\boxed\{(\d+)\}")
WORK = re.compile(r"<think>(\d)\+(\d)\+(\d)</think>")


def exact_answer(response: str, reference: str) -> float:
    """Return 1.0 if the last boxed number of ``response`` equals ``reference``, else 0.0."""
    boxed = ANSWER.findall(response)
    return float(bool(boxed) and boxed[-1] == str(reference))


def row_accuracy(response: str, rows: list[int]) -> float:
    """Return the share of the rows whose count is right; 0 without all of them."""
    work = WORK.search(response)
    return sum(int(said) == count for said, count in zip(work.groups(), rows)) / len(rows) if work else 0.0


def accuracy(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """Score one response, with verl's signature: ``score`` is the reward, every other key becomes a metric."""
    rows = (extra_info or {}).get("rows", [])
    return {"score": exact_answer(solution_str, ground_truth), "rows": row_accuracy(solution_str, rows)}
