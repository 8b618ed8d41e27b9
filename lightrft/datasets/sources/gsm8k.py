"""GSM8K, word problems (Cobbe et al. 2021, arXiv:2110.14168): ``{question, answer}`` that ends with ``#### 42``."""
import re

from lightrft.datasets.loading import DataError, Row
from lightrft.datasets.sources import SOURCES

INSTRUCTION = ("Reason step by step inside <think> and </think> tags, then give the final answer inside \\boxed{}, "
               "for example <think>6 * 7 = 42.</think>\\boxed{42}")
_FINAL = re.compile(r"####\s*(-?[\d.,]+)")


def final_answer(answer: str) -> str:
    """Return the number after ``####``, without thousands separators.

    Raises:
        DataError: there is no such number.
    """
    found = _FINAL.search(answer)
    if found is None:
        raise DataError(f"the answer does not end with '#### number': {answer[-80:]!r}")
    return found.group(1).replace(",", "").rstrip(".")


@SOURCES.register("gsm8k", "openai/gsm8k")
def gsm8k(row: Row, split: str, index: int) -> Row:
    """Convert one problem to our schema: system instruction and question, the final number as reference."""
    if not row.get("question") or not row.get("answer"):
        raise DataError(f"row {index + 1} of split {split!r} has no question or no answer (it has {', '.join(row)})")
    solution = final_answer(row["answer"])
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": row["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {
            "split": split, "index": index, "label": "gsm8k_rule", "reference": solution, "answer": solution,
            "question": row["question"], "full_solution": row["answer"]
        }
    }  # yapf: disable
