"""Rules of the sizes of batches, which need neither torch nor a GPU."""
from collections.abc import Iterator
from math import gcd, isqrt

from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.schema import Config
from lightrft.config.shared_schema import Tree


def batch_problems(c: Tree, world_size: int) -> Iterator[str]:
    """Yield the problems of the batches of a run on ``world_size`` ranks; a command that trains nothing has none."""
    if isinstance(c, Config):
        yield from _of_rollout(c, world_size)
    elif isinstance(c, OfflineConfig):
        yield from per_rank("train_batch_size", c.train.train_batch_size, world_size)


def _of_rollout(c: Config, world_size: int) -> Iterator[str]:
    """Yield the problems of the batches of prompts and of samples."""
    prompts, samples, batch = c.rollout.rollout_batch_size, c.rollout.n_samples_per_prompt, c.train.train_batch_size
    if min(prompts, samples, batch) < 1:
        return
    total = prompts * samples
    if total % batch:
        yield (
            f"--train_batch_size {batch}: a rollout has {prompts} prompts x {samples} samples = {total}, which must be "
            f"a multiple of it; nearest valid: --train_batch_size {nearest_divisors(total, batch)}, "
            f"or --rollout_batch_size {nearest_multiples(prompts, batch // gcd(batch, samples))}")
    for name, value in (("rollout_batch_size", prompts), ("train_batch_size", batch)):
        yield from per_rank(name, value, world_size)


def nearest_multiples(value: int, step: int) -> str:
    """Format the multiples of ``step`` around ``value`` that are above 0: ``96 or 128``."""
    below = value // step * step
    return " or ".join(str(n) for n in (below, below + step) if n > 0)


def nearest_divisors(total: int, value: int) -> str:
    """Format the divisors of ``total`` around ``value``: ``4 or 8``."""
    small = [n for n in range(1, isqrt(total) + 1) if total % n == 0]
    divisors = [*small, *(total // n for n in small)]
    picks = [max((n for n in divisors if n <= value), default=0), min((n for n in divisors if n >= value), default=0)]
    return " or ".join(str(n) for n in dict.fromkeys(picks) if n)


def per_rank(name: str, value: int, world_size: int) -> Iterator[str]:
    """Yield a problem of a count that is smaller than the number of ranks."""
    if value < world_size:
        yield (
            f"--{name} {value}: each of the {world_size} ranks needs at least one; nearest valid value: {world_size}")
