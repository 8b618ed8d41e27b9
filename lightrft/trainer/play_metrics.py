"""Metrics of environments: what they did in the responses of a rollout or an evaluation."""
from collections import Counter
from collections.abc import Sequence

from lightrft.environments.base import FAILURES, LIMITS
from lightrft.strategy.base import StrategyBase
from lightrft.types import Episode


def play_metrics(episodes: Sequence[Episode], strategy: StrategyBase) -> dict[str, float]:
    """Return ``env/*`` of the responses of all ranks: means per response of turns, calls, seconds of waiting and of the
    numbers of the environment, and counts of responses by the cause that ended them; a collective.

    Nothing is returned if no response has an environment.
    """
    total = Counter[str]()
    for counts in strategy.all_gather_object(_counts(episodes)):
        total.update(counts)
    size = total.pop("responses", 0)
    if not size:
        return {}
    causes = {f"env/{cause}": float(total.pop(cause, 0)) for cause in (*FAILURES, *LIMITS, "restarts")}
    return causes | {f"env/{name}/mean": value / size for name, value in sorted(total.items())}


def _counts(episodes: Sequence[Episode]) -> Counter[str]:
    counts = Counter[str]()
    for play in (episode.play for episode in episodes if episode.play is not None):
        counts.update({"responses": 1, "turns": play.turns, "calls": play.calls, "restarts": play.restarts})
        sums: dict[str, float] = play.metrics | {"wait_s": play.wait_s}
        for name, value in sums.items():
            counts[name] += value  # type: ignore[assignment]  # a sum of seconds
        counts.update(cause for cause in (play.failure, play.limit) if cause)
    return counts
