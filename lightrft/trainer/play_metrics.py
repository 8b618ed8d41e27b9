"""Metrics of environments: what they did in the responses of a rollout."""
from collections import Counter
from collections.abc import Sequence

from lightrft.strategy.base import StrategyBase
from lightrft.types import Episode
from lightrft.utils.play import FAILURES, LIMITS


def play_metrics(episodes: Sequence[Episode], strategy: StrategyBase) -> dict[str, float]:
    """Return ``env/*`` of the responses of all ranks: means per response of turns, calls, seconds of waiting and of the
    numbers of the environment, and counts of responses by the cause that ended them; a collective.

    Nothing is returned if no response has an environment.
    """
    causes, sums, size = Counter[str](), Counter[str](), 0
    for causes_of_rank, sums_of_rank, responses in strategy.all_gather_object(_counts(episodes)):
        causes.update(causes_of_rank)
        sums.update(sums_of_rank)
        size += responses
    if not size:
        return {}
    counts = {f"env/{cause}": float(causes[cause]) for cause in (*FAILURES, *LIMITS, "restarts", "replays")}
    return counts | {f"env/{name}/mean": value / size for name, value in sorted(sums.items())}


def _counts(episodes: Sequence[Episode]) -> tuple[Counter[str], Counter[str], int]:
    """Return the counts of causes, sums of numbers, and the number of responses that have an environment."""
    plays = [episode.play for episode in episodes if episode.play is not None]
    causes = Counter(cause for play in plays for cause in (play.failure, play.limit) if cause)
    causes["restarts"] = sum(play.restarts for play in plays)
    causes["replays"] = sum(play.replays for play in plays)
    sums = Counter[str]()
    sums.update({"forks": forks} if (forks := sum(len(episode.closed) for episode in episodes)) else {})
    for play in plays:
        images = {"images": len(play.shown)} if play.shown or "images" in play.metrics else {}
        sums.update(play.metrics | {"turns": play.turns, "calls": play.calls, "wait_s": play.wait_s} | images)
    return causes, sums, len(plays)
