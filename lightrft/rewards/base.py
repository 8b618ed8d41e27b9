"""What a reward sees and says. Nothing here imports torch: worker processes import this module."""
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightrft.utils.registry import Registry


@dataclass(frozen=True)
class RewardInput:
    """One response with everything its row knows. ``response`` never contains the prompt."""
    prompt: str
    response: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    data_source: str = ""
    label: str = ""
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Score:
    """The verdict on one response. ``total`` None means *unscored*: ``error`` then is a short, countable cause."""
    total: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    weights: dict[str, float] = field(default_factory=dict)  # of the parts that make the total


@dataclass(frozen=True)
class Outcome:
    """What one reward part says about one response: a ``value``, or None with the ``error`` (a short, countable cause).

    ``detail`` is for people (a traceback, a server's answer); ``extra`` holds further numbers for the metrics.
    """
    value: float | None
    error: str | None = None
    detail: str = ""
    extra: dict[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """One reward part, a batch at a time: a number per response, None where it cannot judge."""

    def __call__(self, batch: list[RewardInput]) -> list[float | None]:
        """Scores in the order of ``batch``."""


REWARDS: Registry[Reward] = Registry("reward")
