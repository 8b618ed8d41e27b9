"""Options of a script that parses its command line itself: ``argparse`` namespace -> option tree with provenance."""
import argparse
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lightrft.config.cli import ParsedConfig
from lightrft.config.compat import grant_without, GRANTED_VALUES, REFUSED
from lightrft.config.files import convert_options
from lightrft.config.flags import convert_text
from lightrft.config.layers import Layer, resolve
from lightrft.config.options import ConfigError, Option
from lightrft.config.schema import Config
from lightrft.config.tree import build, options, with_aliases
from lightrft.utils.logging import get_logger

_UNSET = {"freezing_actor_steps": -1}  # defaults of LightRFT's scripts that stand for nothing


def config_of(args: argparse.Namespace, keywords: Mapping[str, Any] | None = None, tree: type = Config) -> ParsedConfig:
    """Build the option tree from a namespace of :func:`lightrft.utils.cli_args.add_arguments`.

    A value that the script gave to an option, by a flag of its own or after parsing, is a default of the script: it
    loses to the presets on the command line, and does not count where nothing reads the option. None is the default of
    the option.

    Args:
        keywords: options that the program gives by name; they win over flags.

    Raises:
        ConfigError: with every problem.
    """
    known, given = options(tree), dict(vars(args))
    problems = [*grant_without(given)]
    values = dict(_converted(given, known, problems))
    _tell_of_own_flags(given, known)
    written = set(given.get("_written", ()))
    flags = {name: value for name, value in values.items() if name in written}
    own = _differing(keywords or {}, values, tree)
    merged = {name: option.default for name, option in known.items()} | values | own
    read = {name for name, option in known.items() if option.is_read(merged, known)}
    script = {name: value for name, value in values.items() if name in read - written and value != known[name].default}
    if problems:
        raise ConfigError(problems)
    resolved, provenance = resolve(tree, script, [Layer("flag", flags), Layer("keyword", own)])
    return ParsedConfig(build(tree, resolved), provenance, False, [])


def _converted(given: dict[str, Any], known: Mapping[str, Option], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options in ``given`` with their values; what is wrong with one is added to ``problems``."""
    given = with_aliases(given, known)
    for name, option in known.items():
        if given.get(name) not in (None, _UNSET.get(name)):
            try:
                yield name, _value(option, given[name])
            except argparse.ArgumentTypeError as error:
                problems.append(f"{option.flag}: {error}")
            except ConfigError as error:
                problems += error.problems


def _value(option: Option, value: Any) -> Any:
    """Convert a value; flags of a script's own may hold words, or True where an option has a list."""
    if option.many and isinstance(value, bool):
        return option.convert(option.bare if value and option.bare else [])
    return convert_text(option, value) if isinstance(value, str) else option.convert(value)


def _differing(keywords: Mapping[str, Any], values: Mapping[str, Any], tree: type) -> dict[str, Any]:
    """Convert the keywords; those that repeat the namespace are left out."""
    converted = convert_options(dict(keywords), tree)
    return {name: value for name, value in converted.items() if name not in values or values[name] != value}


def _tell_of_own_flags(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Warn of flags of the script itself that the trainer does not read, though LightRFT's reads flags of that name."""
    for name in REFUSED:
        if given.get(name) is True and name not in {*known, *GRANTED_VALUES}:
            get_logger().warning(
                f"--{name} is a flag of this script, and the trainer does not read it: {REFUSED[name]}")
