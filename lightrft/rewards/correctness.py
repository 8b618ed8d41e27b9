"""Rule that decides whether an answer is right: by a reward part whose values mean right or wrong.

The part is, in this order: that of ``--accuracy_part``; one called ``accuracy``; the number ``acc`` that a function
returns; a built-in rule (``math``, ``exact``, ``choice``, ``answer``); the only other part, if all of its values have
been 0 or 1. Without such a part nothing says what is right, and there is no accuracy.
"""
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lightrft.config.reward_schema import RewardConfig
from lightrft.rewards.spec import parse_models
from lightrft.utils.errors import did_you_mean, UserError

RULES = ("math", "exact", "choice", "answer")  # built-in parts that give 1 to a right answer
FORMS = ("format", "tags")  # built-in parts that judge only the form
Parts = Mapping[str, float | None]  # of a scored answer, by name; numbers that a function returns are "part/key"


def check_accuracy_part(accuracy_part: str | None, names: Iterable[str], answers: Collection[Parts] = ()) -> None:
    """Raise :class:`UserError` if nothing has the name that ``--accuracy_part`` gives.

    Args:
        names: of the parts of the run's rewards.
        answers: scored ones; a number "part/key" is not known before its part has judged one of them.
    """
    known = {*names, *(name for parts in answers for name in parts)}
    part, of_function, _ = (accuracy_part or "").rpartition("/")
    awaited = of_function and part in known and all(parts.get(part) is None for parts in answers)
    if accuracy_part is not None and accuracy_part not in known and not awaited:
        raise UserError(f"--accuracy_part {accuracy_part}: no reward of this run gives it"
                        f"{did_you_mean(accuracy_part, known)}; they give: {', '.join(sorted(known))}. Name one of "
                        "these, or a number that a function returns with every answer, as part/key")


class Correctness:
    """Rule of a run; it has to see all answers (:meth:`observe`) before it judges one.

    Args:
        accuracy_part: name of the part, or of a number ("part/key"), whose value 1 means right.
        others: parts that never say what is right, such as reward models.
    """

    def __init__(self, accuracy_part: str | None = None, others: Iterable[str] = ()) -> None:
        self.accuracy_part, self.others = accuracy_part, {*FORMS, *others}
        self.seen: set[str] = set()
        self.graded: set[str] = set()  # parts with another value than 0 and 1

    @classmethod
    def of(cls, rewards: RewardConfig, accuracy_part: str | None) -> "Correctness":
        """Return the rule of a run with these rewards."""
        return cls(accuracy_part, parse_models(rewards.reward_pretrain))

    def observe(self, answers: Iterable[Parts]) -> None:
        """Take in the values of answers."""
        for parts in answers:
            self.seen.update(parts)
            self.graded.update(name for name, value in parts.items() if value not in (0, 1, None))

    def state_dict(self) -> dict[str, list[str]]:
        """Return what all answers so far have shown, for a run that resumes."""
        return {"seen": sorted(self.seen), "graded": sorted(self.graded)}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        """Continue from :meth:`state_dict`."""
        self.seen, self.graded = {*state["seen"]}, {*state["graded"]}

    def is_right(self, parts: Parts, weights: Mapping[str, Any] | None = None) -> bool | None:
        """Return True for a right answer, False for a wrong one, None where no part says what is right.

        Args:
            parts: of an answer that is scored.
            weights: of its parts; one with a negative weight is a penalty.
        """
        name = self.part_of(parts, weights or {})
        return None if name is None else (parts.get(name) or 0.0) >= 1.0 - 1e-6

    def part_of(self, parts: Parts, weights: Mapping[str, float]) -> str | None:
        """Return the name of the part, or of the number, that says whether an answer is right."""
        top = [name for name in parts if name.partition("/")[0] == name or name in weights]
        numbers = [name for name in sorted(self.seen) if name.rpartition("/")[0] in top]
        accuracies = [name for name in numbers if name.endswith("/acc")]
        candidates = [name for name in top if name not in self.others and weights.get(name, 1.0) >= 0]
        binary = [name for name in candidates if name not in self.graded]
        if self.accuracy_part in (*top, *numbers):
            return self.accuracy_part
        named = [name for name in ("accuracy", *accuracies[:len(accuracies) == 1], *RULES)
                 if name in (*top, *accuracies)]  # yapf: disable
        return next(iter(named), binary[0] if len(binary) == 1 else None)

    def remedy(self, answers: Iterable[Parts]) -> str:
        """Return the parts of ``answers`` that nothing defines, and how to define what is right."""
        names = sorted({name for parts in answers for name in parts})
        chosen = f"--accuracy_part {self.accuracy_part} is none of them: " if self.accuracy_part else ""
        return (f"{chosen}no part of the reward says which answers are right ({', '.join(names)}). Remedy: name a part "
                "whose value 1 means right with --accuracy_part, or let the function return only 0 and 1, or "
                '{"score": ..., "acc": 0 or 1}')
