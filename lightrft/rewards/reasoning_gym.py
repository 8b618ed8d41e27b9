"""Scorers of the package reasoning-gym as a reward, which runs in worker processes."""
import json
from collections.abc import Callable
from functools import cache
from typing import Any

from lightrft.utils.errors import CaptureException, UserError
from lightrft.utils.marked_answers import extract_answer


def reasoning_gym(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, turns: Any) -> float:
    """Return what the scorer of the row's data set gives, from 0 to 1.

    It reads the answer that the last turn marks, as ``<answer>..</answer>`` or ``\\boxed{..}``; without a mark, the
    text behind a thought. An answer at which the scorer raises an error is a wrong one, unless it does so at the right
    answer too.

    Raises:
        UserError: the row is none of ``--prompt_data reasoning_gym:NAME``.
    """
    entry = (extra_info or {}).get("entry")
    if not isinstance(entry, str):
        raise UserError(f"the reward reasoning_gym reads rows of --prompt_data reasoning_gym:NAME, and one of "
                        f"{data_source!r} has no extra_info.entry")
    text = turns[-1]["content"] if turns[-1]["role"] == "assistant" else ""
    marked = extract_answer(text)
    answer = text.rpartition("</think>")[2].strip() if marked is None else marked
    score, known = _scorer(data_source.partition("/")[2]), json.loads(entry)
    with CaptureException():
        return float(score(answer=answer, entry=known))
    score(answer=known["answer"], entry=known)
    return 0.0


@cache
def _scorer(name: str) -> Callable[..., float]:
    """Return the scorer of a data set; to make one may read a file of words."""
    from reasoning_gym import get_score_answer_fn
    return get_score_answer_fn(name)
