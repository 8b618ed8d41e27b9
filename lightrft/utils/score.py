"""Score of one response. Nothing here imports torch: worker processes import this module."""
from dataclasses import dataclass, field


@dataclass
class Score:
    """Score of one response. ``total`` None means *unscored*: ``error`` is then a short, countable cause.

    ``fault``: cause of a reward of 0 for which the response itself is to blame.
    """
    total: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None
    weights: dict[str, float] = field(default_factory=dict)  # weights of the parts in the total
    # share of each step in the total, weighted, with the character of the answer that follows the step
    steps: list[tuple[int, float]] = field(default_factory=list)
    fault: str | None = None
