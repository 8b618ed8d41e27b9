"""A calculator with two tools. Demonstrations call them in the right form, and guess more often than they call.

``34+28`` -> ``<tool_call>{"name": "add", "arguments": {"a": 34, "b": 28}}</tool_call>``; the tool answers ``62``, and
the model repeats it. Supervised training teaches the form and bad habits: to guess, and to call the wrong tool;
reinforcement learning on the answer alone mends them. No torch in this file, which worker processes import.
"""
import hashlib
import random
from collections.abc import Iterator
from typing import Any

MAYBE = "maybe "  # begins a guess, which repeats the first number
WORDS = ["add", "multiply", MAYBE]
RIGHT, GUESS = 0.27, 0.55  # shares of demonstrations: the right tool; a guess without a tool; else the wrong tool
HELD_OUT = 10  # one problem in this many is held out
DEMONSTRATIONS = 600 * 32
OPTIONS = {"reward": [f"{__file__}:right"], "prompt_max_len": 32, "generate_max_len": 48, "max_turns": 2,
           "actor_learning_rate": 3e-4}  # yapf: disable


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


tools = [add, multiply]
SIGNS = {"+": add, "*": multiply}
Problem = tuple[int, str, int]


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, turns: list[dict[str,
                                                                                                    Any]]) -> float:
    """Return 1.0 if the last turn is the answer, else 0.0: what a tool said earns nothing by itself."""
    last = turns[-1]
    return float(last["role"] == "assistant" and last["content"].strip() == ground_truth)


def problems(seed: str, held_out: bool) -> Iterator[Problem]:
    """Yield endless problems of one split; they may repeat."""
    rng = random.Random(seed)
    while True:
        problem = rng.randint(10, 99), rng.choice([*SIGNS]), rng.randint(10, 99)
        digest = hashlib.blake2b(str(problem).encode(), digest_size=8).digest()
        if (int.from_bytes(digest, "big") % HELD_OUT == 0) == held_out:
            yield problem


def asked(problem: Problem) -> dict[str, str]:
    """Return the message of the user."""
    return {"role": "user", "content": "".join(map(str, problem))}


def prompt_rows(count: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` problems of ``split`` ("train" or "test") with their answers."""
    drawn = problems(f"{split}-{seed}", split == "test")
    return [{"prompt": [asked(problem)], "reference": str(SIGNS[problem[1]](problem[0], problem[2]))}
            for problem, _ in zip(drawn, range(count))]  # yapf: disable


def demonstration_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` demonstrations on training problems, as chat messages."""
    rng, drawn = random.Random(f"sft-{seed}"), problems(f"sft-{seed}", held_out=False)
    return [{"messages": demonstration(problem, rng)} for problem, _ in zip(drawn, range(count))]


def demonstration(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation: a guess, or a call and its result."""
    first, sign, second = problem
    draw = rng.random()
    if draw < GUESS:
        return [asked(problem), {"role": "assistant", "content": f"{MAYBE}{first}"}]
    tool = SIGNS[sign if draw < GUESS + RIGHT else "*" if sign == "+" else "+"]
    call = {"type": "function", "function": {"name": tool.__name__, "arguments": {"a": first, "b": second}}}
    result = str(tool(first, second))
    return [
        asked(problem), {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool.__name__, "content": result}, {"role": "assistant", "content": result}
    ]
