"""Declaration of one option, its form as read from a dataclass, and the conversion and checks of its values."""
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import Any

from lightrft.config.foreign_values import nearest_value, synonym
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger

TEXTS = ("help", "within", "why", "needs", "hint", "card", "path", "required", "bare"
         )  # fields of an option that are text
EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "text",
            dict: "a JSON object such as {\"name\": true}"}  # yapf: disable
# intervals of numeric options, for ``within``
ANY, COUNT, POSITIVE, NON_NEGATIVE, SHARE, PROBABILITY = ("(-inf, inf)", "[1, inf)", "(0, inf)", "[0, inf)", "[0, 1]",
                                                          "(0, 1]")


class ConfigError(UserError):
    """Error in a command line, YAML file or option tree. ``problems`` holds one sentence per problem found."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        head = f"{len(self.problems)} problems in the configuration:\n  " if len(self.problems) > 1 else ""
        super().__init__(head + "\n  ".join(self.problems))


def option(default: Any, text: str, choices: Collection[str] | None = None, *, within: str = "", why: str = "",
           needs: str = "", read_by: tuple[str,
                                           ...] = (), free: bool = False, preset: bool = False, common: bool = False,
           hint: str = "", card: str = "", path: str = "", required: str = "", bare: str = "") -> Any:
    """Declare an option of a group: everything that is known about it.

    Args:
        default: its value when nothing sets it; lists and dicts are copied per instance.
        text: its help.
        choices: of a closed set, or the keys of a mapping, to which plugins add; of an option of type bool, the values
            that it may have beside true and false.
        within: the interval of a number, e.g. ``"(0, 1]"``; every numeric option has one.
        why: the reason for a bound that is not obvious.
        needs: another option and an example value, e.g. ``"kl_target 0.1"``, without which this one has no effect; of
            several, ``"a 1 or b 2"``, one is enough. Of an option with choices these are the values that it must have:
            ``"sync_proof both|canary"``.
        read_by: the engines, strategies or models that alone read it; empty: no such limit.
        free: a resumed run may change it without a warning, because it does not affect what is learnt.
        preset: it sets other options.
        common: most people set it; the short ``--help`` has it.
        hint: expected values, for an option that other trainers give another kind of value. It takes the place of the
            value in messages, because that may be a secret.
        card: its name in the card of a trained model; empty: the card does not show it.
        path: kind of the paths that it names: "model" (folders or hub ids), "models" (with names), "rows" or "suites"
            (of data), "template".
        required: what to give, of an option without which nothing runs.
        bare: of a list, the value that its flag alone stands for; empty: the flag needs a value.
    """
    metadata = {"help": text, "choices": choices, "within": within, "why": why, "needs": needs, "read_by": read_by,
                "free": free, "preset": preset, "common": common, "hint": hint, "card": card, "path": path,
                "required": required, "bare": bare}  # yapf: disable
    if isinstance(default, (list, dict)):
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One option of the tree.

    ``owner`` is the class that declares it, and ``flag`` what sets it; ``kind`` is the type of its value, or of one
    item if ``many``, and ``kind_name`` the word for that; for the other fields, see :func:`option`.
    """
    group: str
    owner: str
    name: str
    flag: str
    kind: type
    kind_name: str
    many: bool
    optional: bool
    default: Any
    help: str
    choices: Collection[str] | None = None
    within: str = ""
    why: str = ""
    needs: str = ""
    read_by: tuple[str, ...] = ()
    free: bool = False
    preset: bool = False
    common: bool = False
    hint: str = ""
    card: str = ""
    path: str = ""
    required: str = ""
    bare: str = ""

    @property
    def needed(self) -> dict[str, str]:
        """The options of ``needs``, of which one must be set, and an example of each; ``a|b``: one of these values."""
        return {name: example for name, _, example in (one.partition(" ") for one in self.needs.split(" or ") if one)}

    def is_read(self, values: Mapping[str, Any], known: "Mapping[str, Option]") -> bool:
        """Return True if one of the needed options is set: to a needed value if it has choices, else to any.

        Args:
            values: of all options, by name.
            known: the options themselves, by name.
        """
        return not self.needs or any(values[name] in example.split("|") if known[name].choices else bool(values[name])
                                     for name, example in self.needed.items())  # yapf: disable

    @property
    def type_name(self) -> str:
        """The type as it is written in tables and help texts."""
        words = (("true", "false") if self.kind is bool else ()) + tuple(self.choices or ())
        name = "|".join(words) if self.choices else self.kind_name
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
        if self.kind is bool and self.choices and value in self.choices:
            return value
        parsed = PARSERS[self.kind](value)
        if parsed is None:
            words = " or ".join((EXPECTED[self.kind], *(self.choices if self.kind is bool and self.choices else ())))
            raise ConfigError(self._complaint(words, value))
        if (meant := synonym(self.name, str(parsed))) != str(parsed):
            get_logger().info("%s %s means %s here", self.flag, parsed, meant)
            parsed = PARSERS[self.kind](meant)
        if self.choices and self.kind is not bool and parsed not in self.choices:
            raise ConfigError(
                self._complaint(f"one of {', '.join(self.choices)}", value) +
                nearest_value(self.name, parsed, self.choices))
        return parsed

    def range_problems(self, value: Any) -> Iterator[str]:
        """Yield one sentence per number of ``value`` outside the option's interval."""
        if self.within and value is not None:
            for number in value if self.many else [value]:
                if not _inside(number, self.within):
                    reason = f" ({self.why})" if self.why else ""
                    yield (f"{self.flag} {number:.10g}: must be {in_words(self.within)}{reason}; nearest valid value: "
                           f"{_nearest(number, self.within)}")

    def mistake(self) -> str:
        """Name what is wrong with the declaration itself, or return an empty string."""
        for name in TEXTS:
            if not isinstance(vars(self)[name], str):
                return f"{name}={vars(self)[name]!r}: expected text"
        texts = isinstance(self.choices, (list, tuple, Mapping)) and all(isinstance(one, str) for one in self.choices)
        if self.choices is not None and not (texts and self.kind in (str, bool)):
            return f"choices={self.choices!r}: expected a tuple of texts, for an option of type str or bool"
        return self._interval_mistake() or self._default_mistake()

    def _interval_mistake(self) -> str:
        number = self.kind in (int, float)
        if number and not self.within:
            return "a number needs its interval, e.g. within=\"[0, 1]\""
        if self.within and not number:
            return f"within={self.within!r}: only numbers have an interval; drop it, or make the type int or float"
        if self.within and not _is_interval(self.within):
            return f"within={self.within!r} is not an interval; write it as \"[0, 1]\", \"(0, 1]\" or \"[0, inf)\""
        return ""

    def _default_mistake(self) -> str:
        try:
            read = self.convert(self.default)
        except ConfigError as error:
            return f"its default{str(error).removeprefix(self.flag)}; change the default or the type"
        if read != self.default or self.kind is not float and repr(read) != repr(self.default):
            return f"its default {self.default!r} is read as {read!r}; declare that"
        return next((f"its default{text.removeprefix(self.flag)}" for text in self.range_problems(read)), "")

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


def _object(value: Any) -> dict[str, Any] | None:
    """Convert a mapping, or its JSON text; ``none`` is the empty one."""
    if isinstance(value, str) and value.lower() != "none":
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return None
        return value if isinstance(value, dict) else None
    if not isinstance(value, Mapping):
        return {} if value in (None, "none", "None") else None
    return dict(value) if all(isinstance(name, str) for name in value) else None


PARSERS: dict[type, Callable[[Any], Any]] = {bool: _bool, int: _int, float: finite, str: _str, dict: _object}


def split_commas(text: str) -> list[str]:
    """Split ``a,b`` into its items; a comma inside an item is written ``\\,``. Empty items are dropped."""
    return [item.replace("\\,", ",") for item in re.split(r"(?<!\\),", text) if item]


def line_breaks(text: str) -> str:
    r"""Replace ``\n`` as it is typed in a shell by the line break that it stands for."""
    return text.replace("\\n", "\n")


def show(value: Any) -> str:
    """Format a value as it is typed after its flag."""
    if isinstance(value, list):
        return ",".join(show(item).replace(",", "\\,") for item in value) or "none"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _bounds(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


def _is_interval(text: str) -> bool:
    try:
        low, high = _bounds(text)
    except ValueError:
        return False
    return text[0] in "[(" and text[-1] in "])" and low <= high


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
    """Write an interval in words: ``[1, inf)`` is ``at least 1``, and all numbers are an empty text."""
    low, high = _bounds(interval or ANY)
    if low == -inf and high == inf:
        return ""
    if high == inf:
        return f"{'at least' if interval[0] == '[' else 'greater than'} {low:g}"
    return f"in {interval}"
