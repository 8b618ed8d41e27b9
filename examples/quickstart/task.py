"""The task of the quickstart: additions column by column, and demonstrations that often forget the carry.

``What is 347+286?`` -> ``<think>7+6+0=13,4+8+1=13,3+2+1=06</think>\\boxed{633}``. Supervised training learns the
method and the error. Reinforcement learning on the exact answer alone repairs the error. No torch in this file.
"""
import hashlib
import random
from collections.abc import Iterator
from typing import Any

DATA_SOURCE = "lightrft/quickstart"
CARELESS = 0.6  # probability that a demonstration forgets a carry
HELD_OUT = 10  # one problem in this many is held out
WIDTH = 3  # digits of each number

Problem = tuple[int, int]


def question(problem: Problem) -> str:
    """Return the question, such as ``What is 347+286?``"""
    return f"What is {problem[0]}+{problem[1]}?"


def answer(problem: Problem) -> str:
    """Return the reference answer."""
    return str(sum(problem))


def columns(problem: Problem) -> list[Problem]:
    """Return pairs of digits from the right, e.g. ``[(7, 6), (4, 8), (3, 2)]``."""
    first, second = (str(number).zfill(WIDTH)[::-1] for number in problem)
    return [(int(a), int(b)) for a, b in zip(first, second)]


def solution(problem: Problem, rng: random.Random, careless: float = 0.0) -> str:
    """Write a worked solution that forgets each carry with probability ``careless`` and continues with its result."""
    steps, digits, total = [], "", 0
    for a, b in columns(problem):
        carry = total // 10
        if carry and rng.random() < careless:
            carry = 0
        total = a + b + carry
        steps.append(f"{a}+{b}+{carry}={total:02d}")
        digits = str(total % 10) + digits
    boxed = int(f"{total // 10}{digits}")
    return f"<think>{','.join(steps)}</think>\\boxed{{{boxed}}}"


def is_held_out(problem: Problem) -> bool:
    """Return True if a problem belongs to the test split, by a hash of its two numbers in either order."""
    key = "+".join(map(str, sorted(problem)))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % HELD_OUT == 0


def problems(rng: random.Random, held_out: bool) -> Iterator[Problem]:
    """Yield endless problems of one split, in random order (they may repeat)."""
    low, high = 10**(WIDTH - 1), 10**WIDTH - 1
    while True:
        problem = (rng.randint(low, high), rng.randint(low, high))
        if is_held_out(problem) == held_out:
            yield problem


def distinct_problems(count: int, rng: random.Random, held_out: bool) -> list[Problem]:
    """Return ``count`` different problems of one split."""
    chosen: dict[Problem, None] = {}
    for problem in problems(rng, held_out):
        if len(chosen) >= count:
            break
        chosen[problem] = None
    return list(chosen)


def prompt_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """Return one row in the schema that verl reads."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(problem)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer(problem)},
        "extra_info": {"split": split, "index": index, "label": "quickstart_rule"},
    }  # yapf: disable


def prompt_rows(count: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` distinct problems of ``split`` ("train" or "test")."""
    rng = random.Random(f"{split}-{seed}")
    return [prompt_row(problem, split, i) for i, problem in enumerate(distinct_problems(count, rng, split == "test"))]


def demonstration_rows(count: int, seed: int, careless: float = CARELESS) -> list[dict[str, Any]]:
    """Return ``count`` careless demonstrations on training problems, as chat messages."""
    rng = random.Random(f"sft-{seed}")
    rows = []
    for problem in distinct_problems(count, rng, held_out=False):
        turns = [("user", question(problem)), ("assistant", solution(problem, rng, careless))]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return rows
