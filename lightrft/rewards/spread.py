"""Before training: can rewards differ as much as ``--dynamic_sampling`` asks of a group?"""
from collections.abc import Iterable
from math import inf

from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager, Weighted
from lightrft.rewards.rules import FAST
from lightrft.utils.errors import UserError


def check_spread(manager: RewardManager, rows: Iterable[RewardInput], zero_spread: float) -> None:
    """Raise :class:`UserError` where no row has rewards that differ by more than ``zero_spread``: no group would count.
    """
    most = max((_widest(manager.parts_of(row)) for row in rows), default=inf)
    if most <= zero_spread:
        raise UserError(
            f"--zero_spread {zero_spread:g}: the rewards of these prompts differ by at most {most:g}, the sum of their "
            "weights, so no group of --dynamic_sampling would count and no batch would ever fill; nearest valid "
            f"value: a little below {most:g}")


def _widest(parts: Weighted) -> float:
    """The largest difference of two rewards; the built-in parts are between 0 and 1, of others nothing is known."""
    return sum(abs(weight) if part.name in FAST else inf for part, weight in parts)
