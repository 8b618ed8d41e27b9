"""Guess the number: a game with a state. In most demonstrations one number after another is tried.

The game shows what is left, ``1-15``; the policy guesses ``8``, reads ``9-15``, guesses again, and has four guesses.
Only who halves what is left finds every number. No torch in this file, which worker processes import.
"""
import random
from types import SimpleNamespace
from typing import Any

from lightrft.environments import Step

LAST = 15  # numbers begin with 1
GUESSES = 4
WORDS = [str(number) for number in range(10, LAST + 1)]
HALVE = 0.3  # share of demonstrations whose guesses halve what is left; those of others are its lowest number
DEMONSTRATIONS = 200 * 32
OPTIONS = {"reward": ["environment"], "prompt_max_len": 32, "generate_max_len": 64, "max_turns": GUESSES,
           "actor_learning_rate": 5e-4}  # yapf: disable
ASKED = {"role": "user", "content": "guess"}


class Game:
    """A number to be found; the seed draws it, so all responses of a group look for the same one."""

    def reset(self, prompt: Any, seed: int) -> str:
        """Draw a number, and show that all are left."""
        self.number = random.Random(seed).randint(1, LAST)
        self.low, self.high = 1, LAST
        return self.left()

    def step(self, turn: Any) -> Step:
        """Pay for the number; otherwise show what is left."""
        guess = int(turn.text) if turn.text.isdecimal() else 0
        if guess == self.number:
            return Step(reward=1.0, done=True)
        if self.low <= guess < self.number:
            self.low = guess + 1
        elif self.number < guess <= self.high:
            self.high = guess - 1
        return Step(self.left(), reward=0.0)

    def left(self) -> str:
        """Write which numbers are left."""
        return f"{self.low}-{self.high}"


def prompt_rows(count: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Return the same task ``count`` times: the game differs by its seed."""
    return [{"prompt": [ASKED]}] * count


def demonstration_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` games, as chat messages."""
    rng = random.Random(f"sft-{seed}")
    return [{"messages": demonstration(rng)} for _ in range(count)]


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """Play a game to its end, or until all guesses are used."""
    game, halves = Game(), rng.random() < HALVE
    messages = [ASKED, {"role": "user", "content": game.reset(None, rng.randrange(1 << 30))}]
    for _ in range(GUESSES):
        guess = (game.low + game.high) // 2 if halves else game.low
        step = game.step(SimpleNamespace(text=str(guess)))
        messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": str(step.messages)}]
        if step.done:
            break
    return messages[:-1]
