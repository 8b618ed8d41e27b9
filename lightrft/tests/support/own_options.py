"""Options that algorithms declare in their own files: another value of each, and the flip that shows its effect."""
from collections.abc import Iterator
from typing import Any

from lightrft.algorithms.base import REGISTRIES
from lightrft.config.options import Option
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import extended, group_options

# what makes an algorithm of this kind matter in a tiny run
_BASES: dict[str, dict[str, Any]] = {
    "advantage_estimator": {}, "policy_loss": {"max_epochs": 3, "actor_learning_rate": 0.003}, "rollout_correction":
    {"bf16": True}
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


def own_options() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each option of an algorithm of the package, another value of it, and the options of a run that uses it."""
    known = group_options(extended(AlgorithmConfig))
    for kind, registry in REGISTRIES.items():
        for name in registry:
            for option in registry.get(name).own:
                yield option, another_value(known[option]), {kind: name, **_BASES[kind]}
