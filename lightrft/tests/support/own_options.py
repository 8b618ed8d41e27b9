"""Options that algorithms and optimizers declare in their own files: another value of each, and a run that shows it."""
from collections.abc import Iterator
from typing import Any

from lightrft.config.options import Option
from lightrft.config.schema import AlgorithmConfig, OptimConfig
from lightrft.config.tree import extended, group_options
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.utils.registry import Registry

OPTIM: dict[str, Registry[Any]] = {"optim": OPTIMIZERS}
# what makes an entry of this kind matter in a tiny run
_BASES: dict[str, dict[str, Any]] = {
    "advantage_estimator": {}, "policy_loss": {"max_epochs": 3, "actor_learning_rate": 0.003}, "rollout_correction":
    {"bf16": True}, "optim": {"max_steps": 2}
}


def another_value(option: Option) -> Any:
    """Return a valid value of ``option`` that is not its default."""
    default = option.default
    if option.choices:
        values = list(option.choices)
    elif option.kind is bool:
        values = [not default]
    else:
        values = [0.5 * (default or 0), 2 * (default or 0), 1 + (default or 0), 0.5]
    return next(value for value in map(option.convert, values)
                if value != default and not [*option.range_problems(value)])


def own_options(registries: dict[str, Registry[Any]]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each option of an entry of the package, another value of it, and the options of a run that uses it."""
    known = group_options(extended(AlgorithmConfig)) | group_options(extended(OptimConfig))
    for kind, registry in registries.items():
        for name in registry:
            for option in registry.get(name).own:
                yield option, another_value(known[option]), {kind: name, **_BASES[kind]}
