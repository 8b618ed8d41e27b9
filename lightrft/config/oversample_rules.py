"""``--oversample`` beside options that it cannot work with, or that leave it nothing to do."""
from collections.abc import Iterator
from itertools import pairwise

from lightrft.config.no_effect import changed
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.config.stages import Stages


def oversample_problems(c: Config) -> Iterator[str]:
    """One sentence per problem."""
    r, flag = c.rollout, f"--oversample {c.rollout.oversample:g}"
    if r.oversample == 1:
        for name, value in changed(c, ["max_staleness"]):
            yield f"--{name} {value}: has no effect without --oversample; add --oversample 1.25 or drop --{name}"
        return
    if r.dynamic_sampling:
        yield (f"{flag}: generation ends when enough groups are finished, and --dynamic_sampling knows which of them "
               "count only after their rewards; drop one of them")
    if c.train.max_steps == 1:
        yield f"{flag}: has no effect in a single step, which nothing could follow; set --max_steps 2 or drop it"
    yield from _shorter_stages(r.stages, flag)


def _shorter_stages(entries: list[str], flag: str) -> Iterator[str]:
    try:
        lengths = Stages(entries).lengths
    except ConfigError:
        return  # told elsewhere
    if any(after < before for before, after in pairwise(lengths)):
        yield (f"{flag}: --stages {','.join(entries)} gets shorter, and a response under way could be longer than the "
               f"next stage allows; let the lengths rise, or drop --oversample")
