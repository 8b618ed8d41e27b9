"""Options as read from the dataclass tree, and the conversion of flag texts and YAML values to their types."""
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from math import isfinite
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from lightrft.utils.errors import UserError

EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
# options that had another kind of value in the original LightRFT; that value may be a secret and is not echoed
HINTS = {
    "use_wandb": "the flag takes no key: set WANDB_API_KEY in the environment",
    "use_tensorboard": "the flag takes no folder: events go to SAVE_PATH/tensorboard",
    "freeze_prefix": "name the prefixes of the parameters to freeze, e.g. model.embed_tokens",
}


class ConfigError(UserError):
    """Error in a command line, YAML file or option tree. ``problems`` holds one sentence per problem found."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        head = f"{len(self.problems)} problems in the configuration:\n  " if len(self.problems) > 1 else ""
        super().__init__(head + "\n  ".join(self.problems))


@dataclass(frozen=True)
class Option:
    """One option of the tree. ``kind`` is the type of its value, or of one item if ``many``."""
    group: str
    name: str
    kind: type
    many: bool
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None

    @property
    def flag(self) -> str:
        """The flag that sets the option."""
        return f"--{self.name}"

    @property
    def type_name(self) -> str:
        """The type as it is written in tables and help texts."""
        name = "|".join(self.choices) if self.choices else self.kind.__name__
        return f"{name}, ..." if self.many else name

    def convert(self, value: Any) -> Any:
        """Convert ``value`` (text of a flag, or a YAML / Python value) to the option's type.

        Text is split at commas for lists (``\\,`` is a comma inside an item); ``none`` is ``None`` or the empty list.

        Raises:
            ConfigError: with the option, the value and what was expected.
        """
        none = value is None or isinstance(value, str) and value.lower() == "none"
        if none and self.optional:
            return None
        if not self.many:
            return self._one(value)
        if none:
            return []
        items = split_commas(value) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            items = [items]
        return [self._one(item) for item in items]

    def _one(self, value: Any) -> Any:
        parsed = _PARSERS[self.kind](value)
        if parsed is None:
            raise ConfigError(self._complaint(EXPECTED[self.kind], value))
        if self.choices and parsed not in self.choices:
            raise ConfigError(
                self._complaint(f"one of {', '.join(self.choices)}", value) + did_you_mean(value, self.choices))
        return parsed

    def _complaint(self, expected: str, value: Any) -> str:
        if self.name in HINTS:
            return f"{self.flag}: expected {expected} ({HINTS[self.name]})"
        quote = "; put it in quotes" if self.kind is str and isinstance(value, (bool, int, float)) else ""
        return f"{self.flag}: expected {expected}, got {value!r}{quote}"


def _bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else None


def finite(value: Any) -> float | None:
    """Convert a number or its text to a float; None if it is neither or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if isfinite(number) else None


def _int(value: Any) -> int | None:
    """Convert to an integer exactly; 1e6 and 128.0 are integers too."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = finite(value)
    return int(number) if number is not None and number.is_integer() else None


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_PARSERS: dict[type, Callable[[Any], Any]] = {bool: _bool, int: _int, float: finite, str: _str}


def split_commas(text: str) -> list[str]:
    """Split ``a,b`` into its items; a comma inside an item is written ``\\,``. Empty items are dropped."""
    return [item.replace("\\,", ",") for item in re.split(r"(?<!\\),", text) if item]


def did_you_mean(name: Any, known: Iterable[str], prefix: str = "") -> str:
    """Return `` (did you mean x?)`` for the nearest known name, written with ``prefix``, or an empty string."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def _option(group: str, spec: Field, annotation: Any) -> Option:
    many = get_origin(annotation) is list
    inner = get_args(annotation) or (annotation, )
    kind = next(t for t in inner if t is not NoneType)
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    return Option(group, spec.name, kind, many, NoneType in inner, default, spec.metadata["help"],
                  spec.metadata["choices"])


def group_options(cls: type, group: str = "") -> dict[str, Option]:
    """Read the options of one group (a dataclass such as ``StrategyConfig``), by name."""
    hints = get_type_hints(cls)
    return {spec.name: _option(group, spec, hints[spec.name]) for spec in fields(cls)}


def groups(tree: type) -> dict[str, type]:
    """Map the field names of a tree (such as ``Config``) to the dataclasses of its groups."""
    hints = get_type_hints(tree)
    return {spec.name: hints[spec.name] for spec in fields(tree)}


def options(tree: type) -> dict[str, Option]:
    """Collect every option of a tree, by name. Names are flags, so a name that two groups use raises ``ValueError``."""
    found: dict[str, Option] = {}
    for group, cls in groups(tree).items():
        for name, option in group_options(cls, group).items():
            if name in found:
                raise ValueError(f"option {name!r} is in the groups {found[name].group!r} and {group!r}")
            found[name] = option
    return found


def build(tree: type, values: dict[str, Any]) -> Any:
    """Build an instance of ``tree`` from converted values by option name; other options take their default."""
    parts = {}
    for group, cls in groups(tree).items():
        parts[group] = cls(**{name: values[name] for name in group_options(cls, group) if name in values})
    return tree(**parts)


def flatten(config: Any) -> dict[str, Any]:
    """Collect the value of every option of a tree instance, by name: the inverse of :func:`build`."""
    flat: dict[str, Any] = {}
    for group in groups(type(config)):
        flat.update(vars(vars(config)[group]))
    return flat
