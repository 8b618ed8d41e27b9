"""``--stages 8k:200,16k:200,32k``: limits on the length of responses, each for a number of steps."""
import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from lightrft.config.options import ConfigError
from lightrft.config.schema import Config

_ITEM = re.compile(r"([1-9]\d*)(k?)(?::([1-9]\d*))?", re.IGNORECASE)
_FORM = "a stage is LENGTH:STEPS, k is 1024 tokens, and the last may leave out its steps, e.g. 8k:200,16k:200,32k"


class Stages:
    """Length limit of the responses of every step; without stages it is the same throughout.

    Args:
        entries: the items of ``--stages``.
        generate_max_len: the limit if there are no stages.

    Raises:
        ConfigError: with the first item that does not parse.
    """

    def __init__(self, entries: list[str], generate_max_len: int = 0) -> None:
        self.lengths, counts = [generate_max_len], []
        if entries:
            parsed = [_parse(entries, i) for i in range(len(entries))]
            self.lengths, counts = [length for length, _ in parsed], [count for _, count in parsed if count]
        self.starts = [0, *accumulate(counts)]  # first step of every stage; then the end, if the last stage has one

    @property
    def longest(self) -> int:
        """Largest limit of all stages, in tokens."""
        return max(self.lengths)

    @property
    def end(self) -> int | None:
        """Steps of the whole run; None if the last stage takes the rest of it."""
        return self.starts[-1] if len(self.starts) > len(self.lengths) else None

    def index(self, step: int) -> int:
        """Index of the stage of the step that follows ``step`` finished ones."""
        return min(bisect_right(self.starts, step), len(self.lengths)) - 1

    def length(self, step: int) -> int:
        """Length limit, in tokens, of the step that follows ``step`` finished ones."""
        return self.lengths[self.index(step)]

    def boundary(self, step: int) -> str | None:
        """Log line for a step at which a stage begins, else None."""
        if len(self.lengths) == 1 or step not in self.starts[:len(self.lengths)]:
            return None
        i = self.index(step)
        until = f"to step {self.starts[i + 1]}" if i + 1 < len(self.starts) else "to the end"
        return f"stage {i + 1} of {len(self.lengths)}: responses of at most {self.lengths[i]} tokens {until}"


def _parse(entries: list[str], i: int) -> tuple[int, int | None]:
    """Parse item ``i`` into its length in tokens and its steps."""
    where, found = f"--stages: item {i + 1} of {len(entries)}, {entries[i]!r},", _ITEM.fullmatch(entries[i].strip())
    if found is None:
        raise ConfigError(f"{where} does not parse: {_FORM}")
    if found[3] is None and i + 1 < len(entries):
        raise ConfigError(f"{where} has no number of steps: {_FORM}")
    return int(found[1]) * (1024 if found[2] else 1), int(found[3]) if found[3] else None


def stage_options(entries: list[str]) -> dict[str, Any]:
    """The options that follow from ``--stages``."""
    stages = Stages(entries)
    return {"generate_max_len": stages.longest} | ({"max_steps": stages.end} if stages.end else {})


def steps_of_data(c: Config, rows: int) -> int:
    """Steps of a run on ``rows`` prompts: ``max_steps``, or the batches in ``num_episodes`` passes over them. Dynamic
    sampling makes a step of the rows that are left at the end."""
    size, draws = c.rollout.rollout_batch_size, c.train.num_episodes * rows
    return c.train.max_steps or (draws + (size - 1 if c.rollout.dynamic_sampling else 0)) // size


def check_total(c: Config, total: int) -> None:
    """Raise :class:`ConfigError` if a run of ``total`` steps, as the data gives, ends before its last stage, or before
    the policy is trained."""
    entries = c.rollout.stages
    last, frozen = Stages(entries).starts[-1] if entries else 0, [*never_trained(c.train.freezing_actor_steps, total)]
    if total <= last and Stages(entries).end is None:
        raise ConfigError(f"--stages {','.join(entries)}: the last stage begins after {last} steps, and the data gives "
                          f"{total}; raise --num_episodes or set --max_steps")
    if frozen:
        raise ConfigError(frozen)


def never_trained(frozen: int, total: int) -> Iterator[str]:
    """Yield the problem of a run of ``total`` steps (0: not known yet) in all of which the policy is ``frozen``."""
    if 0 < total <= frozen:
        yield (f"--freezing_actor_steps {frozen}: the policy is never trained in {total} step{'s' * (total > 1)}; "
               f"nearest valid value: {total - 1}, or make the run longer (--max_steps, --num_episodes)")


def length_problems(c: Config) -> Iterator[str]:
    """Yield problems: stages that do not parse, and options that contradict the length limits."""
    entries, length, buffer = c.rollout.stages, c.rollout.generate_max_len, c.reward.overlong_buffer_len
    try:
        stages = Stages(entries, length)
    except ConfigError as error:
        yield str(error)
        return
    shortest = min(stages.lengths)
    if c.reward.overlong_buffer and buffer >= shortest:
        yield (f"--overlong_buffer_len {buffer}: the penalty zone must be shorter than a response may be, {shortest} "
               f"tokens; nearest valid value: {shortest - 1}")
    if entries and length != stages.longest:
        yield (f"--generate_max_len {length}: --stages {','.join(entries)} sets the lengths; nearest valid value: "
               f"{stages.longest}, or drop it")
    if entries:
        yield from _step_problems(stages, c.train.max_steps, ",".join(entries))


def _step_problems(stages: Stages, max_steps: int, text: str) -> Iterator[str]:
    if stages.end and max_steps != stages.end:
        yield (f"--max_steps {max_steps}: --stages {text} runs for {stages.end} steps; nearest valid value: "
               f"{stages.end}, or leave out the steps of the last stage")
    if not stages.end and 0 < max_steps <= stages.starts[-1]:
        yield (f"--max_steps {max_steps}: the last stage of --stages {text} begins after {stages.starts[-1]} steps; "
               f"nearest valid value: {stages.starts[-1] + 1}")
