"""Checks of all options against each other, the machine and the files, before any process group exists."""
from collections.abc import Iterator, Mapping
from typing import Any

from lightrft.config.options import ConfigError, show
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import flatten, options
from lightrft.preflight.base import preflight


def validate(config: Tree, world_size: int, cuda: bool | None = None, planned: bool = False,
             local_ranks: int = 0) -> None:
    """Check a whole tree for a run on ``world_size`` ranks.

    Args:
        cuda: the ranks have GPUs; None: if this machine has one.
        planned: the run is planned for another machine, so this one need not have its packages.
        local_ranks: ranks on each machine; 0: all of them.

    Raises:
        ConfigError: with every problem found: option, value, reason and the nearest valid value or the remedy.
    """
    import torch
    cuda = torch.cuda.is_available() if cuda is None else cuda
    plan = preflight(config)
    found = [*plan.problems(world_size, cuda, local_ranks or world_size), *(() if planned else plan.missing_packages())]
    if found:
        raise ConfigError(list(dict.fromkeys(found)))


def warnings(config: Tree) -> Iterator[str]:
    """Yield warnings about choices that are allowed but rarely intended."""
    return preflight(config).warnings()


def changes(saved: Mapping[str, Any], config: Tree) -> list[str]:
    """List ``--name value (was other)`` for each option that affects what is learnt and differs on resume.

    Args:
        saved: the options of the checkpoint, flat; an option that it does not know is not compared.
        config: of the resumed run.
    """
    now = flatten(config)
    return [
        f"--{name} {show(now[name])} (was {show(saved[name])})" for name, option in options(config).items()
        if not option.free and saved.get(name, now[name]) != now[name]
    ]


def lost_length(saved: Mapping[str, Any], config: Tree) -> str | None:
    """Explain an undefined length of the run: it counts batches of the data, and their size has changed; else None."""
    name, now = config.BATCH, flatten(config)
    if now["max_steps"] or saved.get(name, now[name]) == now[name]:
        return None
    return (f"--{name} {now[name]}: the checkpoint was made with {saved[name]}, so the remaining data is not a whole "
            f"number of steps; resume with --{name} {saved[name]}, or set the end of the run with --max_steps")
