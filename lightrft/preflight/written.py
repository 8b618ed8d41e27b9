"""Rules of the options as they are written, which ask neither the machine nor torch."""
from collections.abc import Iterator

from lightrft.config.layers import with_sources
from lightrft.config.options import ConfigError
from lightrft.config.reward_schema import RewardConfig
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import check_ranges, flatten, options
from lightrft.preflight.paths import PATHS
from lightrft.preflight.reward_rules import written_rewards
from lightrft.rewards.judge import REWARDS  # with its own entry
from lightrft.rewards.spec import parse_entry, parse_models


def refuse_as_written(c: Tree, provenance: dict[str, str]) -> None:
    """Raise an error with what :func:`written_problems` finds, or for an unknown reward."""
    if found := [*written_problems(c)]:
        raise ConfigError(with_sources(found, provenance))
    _refuse_unknown_rewards(c)


def written_problems(c: Tree) -> Iterator[str]:
    """Yield one sentence per number out of its range, option that is missing, and path that does not exist."""
    yield from check_ranges(c)
    yield from c.missing()
    known = options(c)
    for name, value in flatten(c).items():
        if known[name].path:
            yield from PATHS[known[name].path](name, value)
    for rewards in _reward_groups(c):
        yield from written_rewards(rewards)


def _refuse_unknown_rewards(c: Tree) -> None:
    """Raise an error for an unknown reward. Python programs skip this check: their rewards may be functions."""
    for rewards in _reward_groups(c):
        for entry in map(parse_entry, rewards.reward):
            if not entry.path and entry.name not in parse_models(rewards.reward_pretrain):
                REWARDS.get(entry.name)


def _reward_groups(c: Tree) -> list[RewardConfig]:
    return [group for group in vars(c).values() if isinstance(group, RewardConfig)]
