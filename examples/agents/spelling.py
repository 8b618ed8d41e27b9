"""A task of reasoning-gym: spell a word backward. Demonstrations spell it forward more often than not.

Questions and scorer are those of the package (``pip install -e '.[reasoning]'``). One turn and no environment: the
reward alone turns the habit round. No torch in this file.
"""
import random
from typing import Any

from lightrft.datasets.reasoning_gym import reasoning_gym_rows

TASK = "reasoning_gym:spell_backward?min_word_len=4&max_word_len=4"
ASKED = "Spell this word backward (example: sun -> nus): "
WORDS = [ASKED]
BACKWARD = 0.3  # share of demonstrations that do what is asked
HELD_OUT = 1 << 30  # the seeds of the package's questions follow one another
DEMONSTRATIONS = 600 * 32
OPTIONS = {"environment": None, "prompt_max_len": 32, "generate_max_len": 12, "actor_learning_rate": 5e-4}


def prompt_rows(count: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` questions of ``split`` ("train" or "test") with what their scorer reads."""
    return reasoning_gym_rows(f"{TASK}&size={count}&seed={seed + (HELD_OUT if split == 'test' else 0)}", split)


def demonstration_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` demonstrations on training questions, as chat messages."""
    rng = random.Random(f"sft-{seed}")
    return [{"messages": demonstration(row, rng)} for row in prompt_rows(count, "train", seed)]


def demonstration(row: dict[str, Any], rng: random.Random) -> list[dict[str, str]]:
    """Return a question with the word in one of the two directions."""
    backward = row["reference"]
    answer = backward if rng.random() < BACKWARD else backward[::-1]
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
