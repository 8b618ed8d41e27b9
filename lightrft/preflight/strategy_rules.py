"""Checks of the strategy options against each other, the number of ranks and the installed packages."""
from collections.abc import Iterator
from importlib.util import find_spec

from lightrft.config.dependencies import changed
from lightrft.config.schema import Config, StrategyConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.strategy.deepspeed import NO_DEEPSPEED

FSDP_OPTIONS = ("fsdp_shard_size", "fsdp_cpu_offload")
ZERO_OPTIONS = ("zero_stage", "zpg", "overlap_comm")


def strategy_problems(c: Config | SFTConfig, world_size: int) -> Iterator[str]:
    """Yield one sentence per problem."""
    s, chosen = c.strategy, c.strategy.resolved(world_size)
    if s.strategy == "single" and world_size > 1:
        yield f"--strategy single: there are {world_size} ranks; nearest valid value: fsdp (or start one process)"
    if chosen == "deepspeed" and find_spec("deepspeed") is None:
        yield NO_DEEPSPEED
    yield from _of_another(c, chosen)
    yield from (_fsdp if chosen == "fsdp" else _zero)(s) if chosen != "single" else ()
    if chosen == "deepspeed":
        for name, value in changed(c, ["initial_model_shard_size"]):
            yield (f"--{name} {value}: has no effect with --strategy deepspeed, which divides the reference model over "
                   "all ranks with --zero_stage 3 and not at all else; drop it")


def _of_another(c: Config | SFTConfig, chosen: str) -> Iterator[str]:
    for strategy, names in (("fsdp", FSDP_OPTIONS), ("deepspeed", ZERO_OPTIONS)):
        if strategy == chosen:
            continue
        where = "on a single process" if chosen == "single" else f"with --strategy {chosen}"
        for name, value in changed(c, names):
            if (name, chosen) != ("fsdp_shard_size", "single"):  # valid on one rank
                yield f"--{name} {value}: has no effect {where}; add --strategy {strategy} or drop it"


def _fsdp(s: StrategyConfig) -> Iterator[str]:
    if s.fsdp_cpu_offload and s.adam_offload:
        yield "--adam_offload True: has no effect with --fsdp_cpu_offload, which holds the optimizer state too; drop it"


def _zero(s: StrategyConfig) -> Iterator[str]:
    if s.zpg > 1 and s.zero_stage < 3:
        yield f"--zpg {s.zpg}: has no effect with --zero_stage {s.zero_stage}, where every rank holds all weights; " \
              "nearest valid value: --zero_stage 3"
    if s.overlap_comm and not s.zero_stage:
        yield ("--overlap_comm True: has no effect with --zero_stage 0, which reduces after the backward pass; "
               "nearest valid value: --zero_stage 1")
