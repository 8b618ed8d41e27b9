"""Declaration of options, their form as read from the dataclass tree, and the conversion and checks of their values."""
import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from difflib import get_close_matches
from functools import cache
from math import inf, isfinite
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightrft.config.compat import ALIASES
from lightrft.utils.errors import UserError

G = TypeVar("G")
RESERVED = ("config", "plugin", "dry_run", "help")  # flags that are no options
EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
# intervals of numeric options, for ``within``
ANY, COUNT, POSITIVE, NON_NEGATIVE, SHARE, PROBABILITY = ("(-inf, inf)", "[1, inf)", "(0, inf)", "[0, inf)", "[0, 1]",
                                                          "(0, 1]")


class ConfigError(UserError):
    """Error in a command line, YAML file or option tree. ``problems`` holds one sentence per problem found."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        head = f"{len(self.problems)} problems in the configuration:\n  " if len(self.problems) > 1 else ""
        super().__init__(head + "\n  ".join(self.problems))


def option(default: Any, text: str, choices: tuple[str, ...] | None = None, *, within: str = "", why: str = "",
           needs: str = "", read_by: tuple[str,
                                           ...] = (), free: bool = False, preset: bool = False, hint: str = "") -> Any:
    """Declare an option of a group: everything that is known about it.

    Args:
        default: its value when nothing sets it; lists are copied per instance.
        text: its help.
        choices: of a closed set.
        within: the interval of a number, e.g. ``"(0, 1]"``; every numeric option has one.
        why: the reason for a bound that is not obvious.
        needs: another option and an example value, e.g. ``"kl_target 0.1"``, without which this one has no effect.
        read_by: the engines, strategies or models that alone read it; empty: no such limit.
        free: a resumed run may change it without a warning, because it does not affect what is learnt.
        preset: it sets other options.
        hint: expected values, for an option that other trainers give another kind of value. It takes the place of the
            value in messages, because that may be a secret.
    """
    metadata = {"help": text, "choices": choices, "within": within, "why": why, "needs": needs, "read_by": read_by,
                "free": free, "preset": preset, "hint": hint}  # yapf: disable
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type, free: bool = False) -> Any:
    """Declare a group of a tree. With ``free``, a resumed run may change all of its options."""
    return field(default_factory=lambda: extended(cls)(), metadata={"free": free})


@dataclass(frozen=True)
class Option:
    """One option of the tree. ``kind`` is the type of its value, or of one item if ``many``; for the other fields, see
    :func:`option`."""
    group: str
    name: str
    kind: type
    many: bool
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    within: str = ""
    why: str = ""
    needs: str = ""
    read_by: tuple[str, ...] = ()
    free: bool = False
    preset: bool = False
    hint: str = ""

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

    def range_problems(self, value: Any) -> Iterator[str]:
        """Yield one sentence per number of ``value`` outside the option's interval."""
        if self.within and value is not None:
            for number in value if self.many else [value]:
                if not _inside(number, self.within):
                    reason = f" ({self.why})" if self.why else ""
                    yield (f"{self.flag} {number:.10g}: must be {in_words(self.within)}{reason}; nearest valid value: "
                           f"{_nearest(number, self.within)}")

    def _complaint(self, expected: str, value: Any) -> str:
        if self.hint:
            return f"{self.flag}: expected {expected} ({self.hint})"
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


def show(value: Any) -> str:
    """Format a value as it is typed after its flag."""
    if isinstance(value, list):
        return ",".join(show(item).replace(",", "\\,") for item in value) or "none"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def did_you_mean(name: Any, known: Iterable[str], prefix: str = "") -> str:
    """Return `` (did you mean x?)`` for the nearest known name, written with ``prefix``, or an empty string."""
    near = get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def _bounds(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


def _inside(value: float, interval: str) -> bool:
    low, high = _bounds(interval)
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def _nearest(value: float, interval: str) -> str:
    """Name the nearest end of the interval, or the valid side of an open end."""
    low, high = _bounds(interval)
    below = value <= low
    end, closed = (low, interval[0] == "[") if below else (high, interval[-1] == "]")
    return f"{end:.10g}" if closed else f"a little {'above' if below else 'below'} {end:.10g}"


def in_words(interval: str) -> str:
    """Write an interval in words: ``[1, inf)`` is ``at least 1``."""
    low, high = _bounds(interval)
    if high == inf:
        return f"{'at least' if interval[0] == '[' else 'greater than'} {low:g}"
    return f"in {interval}"


def _option(group: str, spec: Field, annotation: Any, free: bool) -> Option:
    many = get_origin(annotation) is list
    inner = get_args(annotation) or (annotation, )
    kind = next(t for t in inner if t is not NoneType)
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    known = dict(spec.metadata)
    return Option(group, spec.name, kind, many, NoneType in inner, default, **known | {"free": known["free"] or free})


def group_options(cls: type, group: str = "", free: bool = False) -> dict[str, Option]:
    """Read the options of one group (a dataclass such as ``StrategyConfig``), by name; all are free with ``free``."""
    hints = get_type_hints(cls)
    return {spec.name: _option(group, spec, hints[spec.name], free) for spec in fields(cls)}


def groups(tree: type) -> dict[str, type]:
    """Map the field names of a tree (such as ``Config``) to the dataclasses of its groups, extensions included."""
    hints = get_type_hints(tree)
    return {spec.name: extended(hints[spec.name]) for spec in fields(tree)}


def options(tree: Any) -> dict[str, Option]:
    """Collect every option of a tree, or of an instance of one, by name.

    Raises:
        ConfigError: two groups have an option of the same name; names are flags.
    """
    found: dict[str, Option] = {}
    instance = not isinstance(tree, type)
    classes = {name: type(part) for name, part in vars(tree).items()} if instance else groups(tree)
    for spec in fields(tree):
        for name, option in group_options(classes[spec.name], spec.name, spec.metadata.get("free", False)).items():
            if name in found:
                raise ConfigError(f"--{name} is declared twice, in the groups {found[name].group} and {spec.name}; "
                                  "rename one of them")
            found[name] = option
    return found


_EXTENSIONS: dict[type, dict[str, type]] = {}  # group -> name of the extension -> dataclass


def extend(group: type, extension: Any) -> tuple[str, ...]:
    """Add the options of ``extension`` to a group of every tree of this process, and return their names.

    Args:
        extension: a dataclass derived from ``group``, with one line per option. A class that is defined again, as when
            its module is reloaded, takes the place of the first.

    Raises:
        ConfigError: it is no such class, a line is not a complete option, or the name of one is taken.
    """
    title = f"{extension.__module__}.{extension.__qualname__}"
    if "__dataclass_fields__" not in vars(extension) or not issubclass(extension, group):
        raise ConfigError(f"{title}: options are declared in a @dataclass that is derived from {group.__name__}")
    others = {key: one for key, one in _EXTENSIONS.get(group, {}).items() if key != title}
    bases: list[Any] = [group, *others.values()]
    taken = {spec.name: spec for cls in bases for spec in fields(cls)}
    own = [spec for spec in fields(extension) if taken.get(spec.name) is not spec]
    for spec in own:
        if problem := _line_problem(spec, get_type_hints(extension)[spec.name], spec.name in taken):
            raise ConfigError(f"{title}.{spec.name}: {problem}")
    _EXTENSIONS[group] = others | {title: extension}
    return tuple(spec.name for spec in own)


def _line_problem(spec: Field, annotation: Any, taken: bool) -> str:
    """Name the problem of a line of an extension, or return an empty string."""
    if taken or spec.name in RESERVED or spec.name in ALIASES:
        return f"there is an option --{spec.name} already; choose another name"
    if "help" not in spec.metadata:
        return "declare it with option(default, help)"
    many = get_origin(annotation) is list
    kinds = [t for t in get_args(annotation) or (annotation, ) if t is not NoneType]
    if len(kinds) != 1 or kinds[0] not in _PARSERS:
        return f"the type is {annotation}; nearest valid: bool, int, float, str, one of them | None, or a list of one"
    if kinds[0] in (int, float) and not spec.metadata["within"]:
        return "a number needs its interval, e.g. within=\"[0, 1]\""
    return "the default of a list is a list" if many and not callable(spec.default_factory) else ""


def extended(group: type) -> type:
    """Return ``group``, or a dataclass derived from it that has the options of its extensions too."""
    extensions = _EXTENSIONS.get(group)
    return _combined((*reversed(extensions.values()), group)) if extensions else group


@cache
def _combined(bases: tuple[type, ...]) -> type:
    group = bases[-1]
    return make_dataclass(group.__name__, [], bases=bases,
                          namespace={"__module__": group.__module__, "__doc__": group.__doc__})


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


def check_ranges(config: Any) -> Iterator[str]:
    """Yield one sentence per value of a tree that is outside the interval of its option."""
    values = flatten(config)
    for name, option in options(config).items():
        yield from option.range_problems(values[name])


def group_from_args(cls: type[G], args: argparse.Namespace) -> G:
    """Build one group from a namespace of :func:`lightrft.utils.cli_args.add_arguments`, or of a script's own parser.

    An option that is missing, or ``None`` where it has no such value, takes its default. Values are type-checked.

    Raises:
        ConfigError: with the option, the value and what was expected; also for a preset, which only
            :func:`lightrft.config.cli.parse_config` can put between defaults and flags.
    """
    cls = extended(cls)
    given, known = dict(vars(args)), group_options(cls)
    for alias, (name, value) in ALIASES.items():
        if given.get(alias) is True:
            given.setdefault(name, value)
    taken = {
        name: given[name] for name, option in known.items()
        if name in given and (given[name] is not None or option.optional)
    }
    values = {name: known[name].convert(value) for name, value in taken.items()}
    for name, value in values.items():
        if known[name].preset and value != known[name].default:
            raise ConfigError(f"--{name} {show(value)}: a plain argparse parser cannot tell flags from defaults; "
                              "parse with lightrft.config.cli.parse_config")
    return cls(**values)
