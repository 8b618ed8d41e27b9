"""Rules of the options as they are written, which ask neither the machine nor torch."""
from collections.abc import Container, Iterator
from pathlib import Path

from lightrft.config.inference_schema import ScoreConfig
from lightrft.config.layers import with_sources
from lightrft.config.options import ConfigError
from lightrft.config.reward_schema import RewardConfig
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import check_ranges, flatten, options
from lightrft.preflight.batches import batch_problems
from lightrft.preflight.paths import PATHS
from lightrft.preflight.reward_rules import written_rewards, written_scores
from lightrft.rewards.judge import REWARDS  # with its own entry
from lightrft.rewards.spec import parse_entry, parse_models
from lightrft.rewards.workers.user_file import check_source


def refuse_as_written(c: Tree, provenance: dict[str, str], world_size: int, functions: Container[str] = ()) -> None:
    """Raise an error with what :func:`written_problems` and :func:`batch_problems` find for ``world_size`` ranks, or
    for a reward that is unknown, or a file that is no Python; ``functions`` are rewards of the program."""
    if problems := [*written_problems(c), *batch_problems(c, world_size)]:
        raise ConfigError(with_sources(problems, provenance))
    _refuse_rewards(c, functions)


def written_problems(c: Tree) -> Iterator[str]:
    """Yield one sentence per number out of its range, option that is missing, and path that does not exist."""
    yield from check_ranges(c)
    yield from c.missing()
    known = options(c)
    for name, value in flatten(c).items():
        if known[name].path:
            yield from PATHS[known[name].path](name, value)
    for group in vars(c).values():
        if isinstance(group, RewardConfig):
            yield from written_rewards(group)
        if isinstance(group, ScoreConfig):
            yield from written_scores(group)


def _refuse_rewards(c: Tree, functions: Container[str]) -> None:
    """Raise an error for an unknown reward, and for a reward file with a syntax error."""
    for rewards in _reward_groups(c):
        for entry in map(parse_entry, rewards.reward):
            if entry.path:
                check_source(Path(entry.path))
            elif entry.name not in functions and entry.name not in parse_models(rewards.reward_pretrain):
                REWARDS.get(entry.name)


def _reward_groups(c: Tree) -> list[RewardConfig]:
    scores = [group.as_reward_config() for group in vars(c).values() if isinstance(group, ScoreConfig)]
    return [*(group for group in vars(c).values() if isinstance(group, RewardConfig)), *scores]
