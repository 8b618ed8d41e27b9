"""The option tree as flags of an ``argparse`` parser."""
import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from lightrft.config.compat import ALIASES, grant, GRANTED, GRANTED_VALUES, GRANTED_WITHOUT, REFUSED, refusal
from lightrft.config.options import ConfigError, Option, show
from lightrft.config.schema import Config
from lightrft.config.shared_schema import grants
from lightrft.config.tree import group_options, groups, options
from lightrft.utils.logging import get_logger


def convert_text(option: Option, text: str) -> Any:
    """Convert one command-line word; the ``type=`` of the flag."""
    if option.name in VALUES and (granted := VALUES[option.name](text)) is not None:
        return granted
    try:
        return option.convert(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"{option.flag}: ")) from None


def _no_model(text: str) -> list[str] | None:
    """Return no model for ``{}``, which names none."""
    if text.strip() != "{}":
        return None
    get_logger().info(
        "--reward_pretrain {} has no effect: it names no reward model; rules and files score the responses")
    return []


def _wandb_key(text: str) -> bool | None:
    """Give the key of W&B to its client, which reads the environment; an empty one selects no tracker."""
    if text.lower() in ("true", "false", "none"):
        return None
    if not text.strip():
        get_logger().info("--use_wandb has no effect: its key is empty")
        return False
    os.environ["WANDB_API_KEY"] = text
    sys.argv[:] = [
        re.sub(f"(?<=use_wandb=){re.escape(text)}$", "***", "***" if word == text else word) for word in sys.argv
    ]  # which trackers record
    get_logger().info("--use_wandb: its value is the key of W&B, as in WANDB_API_KEY; it is not stored")
    return True


def _events_folder(text: str) -> bool | None:
    """Read a folder as true; the events have one of their own."""
    if "/" not in text:
        return None
    get_logger().info(f"--use_tensorboard {text} means --use_tensorboard: events go to SAVE_PATH/tensorboard")
    return True


def _is_bfloat16(text: str) -> bool | None:
    """Read the name of a dtype."""
    return {"bf16": True, "bfloat16": True, "fp32": False, "float32": False}.get(text.lower())


VALUES: dict[str, Callable[[str], Any]] = {
    "reward_pretrain": _no_model, "use_wandb": _wandb_key, "use_tensorboard": _events_folder, "bf16": _is_bfloat16
}
"""Option -> the function that reads the words other trainers give it; it returns None for a usual value."""


class _ListAction(argparse.Action):
    """Collects the items of all words; a word may hold several, with commas; ``none`` alone is the empty list.

    A flag that is given again, as by the words that a script passes on, replaces its list, and a warning has both.
    """

    def __init__(self, *args: Any, hint: str = "", bare: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hint, self.bare = hint or "'none' is the empty list", bare

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Any] | None, option_string: str | None = None) -> None:
        if self.nargs is not None and not values and self.bare:
            get_logger().info(f"{option_string} without a value means {option_string} {self.bare}")
            values = [[self.bare]]
        if self.nargs is not None and not values:
            raise argparse.ArgumentError(self, f"expected at least one value ({self.hint})")
        before = vars(namespace).get(self.dest, self.default)
        given = values if self.nargs is None else [item for part in values or () for item in part]
        setattr(namespace, self.dest, given)
        if before is not self.default:
            self._again(parser, str(option_string), before, given)

    def _again(self, parser: argparse.ArgumentParser, flag: str, before: Any, given: Any) -> None:
        if before != given and os.environ.get("RANK", "0") == "0":
            both = f"; both: {flag} {show(before + given)}" if before and given else ""
            get_logger().warning(f"{flag} is given twice: {show(given)} counts, and {show(before)} is dropped{both}")


class _PresetAction(_ListAction):
    """Stores a preset. Giving it twice is an error: two do not add up, the second would replace the first."""

    def _again(self, parser: argparse.ArgumentParser, flag: str, before: Any, given: Any) -> None:
        parser.error(f"{flag} is given twice, {show(before)} and {show(given)}: the second would replace the first; "
                     "give only one")


class _Written(argparse.Action):
    """Base of the flags of a script's own parser: the namespace lists in ``_written`` the options that were written."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Any] | None, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values, option_string)
        vars(namespace).setdefault("_written", []).append(self.dest)


class _StoreWritten(_Written, argparse._StoreAction):
    pass


class _ConstWritten(_Written, argparse._StoreConstAction):
    pass


class _ListWritten(_Written, _ListAction):
    pass


class _AliasWritten(_ConstWritten):
    """Sets the option, and True under the flag's own name."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Any] | None, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values, option_string)
        setattr(namespace, str(option_string).lstrip("-"), True)


class _ForeignAction(argparse.Action):
    """Accepts a flag of another trainer that asks for what always holds, with a notice, and refuses others."""

    def __init__(self, *args: Any, tree: type, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tree = tree

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Any] | None, option_string: str | None = None) -> None:
        name = str(option_string).lstrip("-")
        if not grant(name, values, grants(self.tree)):
            parser.error(str(refusal(name, options(self.tree))))
        if self.default is not argparse.SUPPRESS:
            setattr(namespace, self.dest, values)


def _help(option: Option, default: Any) -> str:
    named = "default" in option.help and default == option.default
    off = f"; off: --no_{option.name}" if default is True else ""
    return (option.help if named else f"{option.help} (default: {show(default)}{off})").replace("%", "%%")


def _add(target: argparse._ArgumentGroup, option: Option, default: Any, quiet: bool) -> None:
    """Add one option; with ``quiet`` a flag that is not given is absent from the namespace, and has no help."""
    shown, kept = (None, argparse.SUPPRESS) if quiet else (_help(option, default), default)
    parse = partial(convert_text, option)
    store: Any = "store" if quiet else _StoreWritten
    if option.kind is bool:
        metavar = "|".join(("true", "false", *(option.choices or ())))
        target.add_argument(option.flag, nargs="?", const=True, type=parse, default=kept, metavar=metavar, help=shown,
                            action=store)
        target.add_argument(f"--no_{option.name}", dest=option.name, const=False, default=argparse.SUPPRESS,
                            help=argparse.SUPPRESS, action="store_const" if quiet else _ConstWritten)
        return
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.kind_name.upper()
    preset = _PresetAction if quiet and option.preset else None
    if option.many:
        target.add_argument(option.flag, nargs="*", action=preset or (_ListAction if quiet else _ListWritten),
                            type=parse, default=kept, metavar=metavar, help=shown, hint=option.hint, bare=option.bare)
    else:
        target.add_argument(option.flag, action=preset or store, type=parse, default=kept, metavar=metavar, help=shown)


def add_tree(parser: argparse.ArgumentParser, tree: type, defaults: dict[str, Any], quiet: bool,
             skip: Collection[str] = ()) -> None:
    """Add every option of ``tree`` in one argument group per dataclass, with the flags of other trainers that
    are translated or accepted.

    Args:
        defaults: values, by option name, that replace those of the tree.
        quiet: options that are not given are absent from the namespace (else they hold their default), and have no
            help text: that of a command is another parser's.
        skip: names that the parser already has.
    """
    for group, cls in groups(tree).items():
        own = {name: option for name, option in group_options(cls, group).items() if name not in skip}
        if own:
            target = parser.add_argument_group(group, cls.__doc__)
        for name, option in own.items():
            _add(target, option, defaults.get(name, option.default), quiet)
    known = options(tree)
    for alias, (name, value) in ALIASES.items():
        if alias not in skip and name in known:
            parser.add_argument(f"--{alias}", dest=name, action="store_const" if quiet else _AliasWritten, const=value,
                                default=argparse.SUPPRESS, help=argparse.SUPPRESS)
            parser.set_defaults(**({} if quiet else {alias: known[name].default == value}))
    absent = argparse.SUPPRESS if quiet else None
    for name in {**GRANTED, **GRANTED_VALUES, **grants(tree)}:
        if name not in skip and name not in known:
            parser.add_argument(f"--{name}", nargs="?", const="true", action=_ForeignAction, tree=tree, default=absent,
                                help=argparse.SUPPRESS)
    for name, (needed, _) in GRANTED_WITHOUT.items():
        if name not in skip and needed in known:
            parser.add_argument(f"--{name}", nargs="?", const="true", default=absent, help=argparse.SUPPRESS)


def add_arguments(parser: argparse.ArgumentParser, tree: type = Config) -> argparse.ArgumentParser:
    """Add all flags of ``tree`` to any parser and return it.

    A flag that the parser already has is left unchanged, and one that it gets later replaces that of ``tree``. Flags of
    the original LightRFT that have no effect here are errors that name the remedy, unless they are the parser's own.
    """
    for container in (parser, parser._optionals, *parser._action_groups):
        container.conflict_handler = "resolve"
    own = frozenset(word.lstrip("-") for action in parser._actions for word in action.option_strings)
    add_tree(parser, tree, {}, quiet=False, skip=own)
    known = options(tree)
    for name in REFUSED:
        if name not in {*own, *known, *GRANTED_VALUES, *GRANTED_WITHOUT}:
            parser.add_argument(f"--{name}", nargs="*", action=_ForeignAction, tree=tree, default=None,
                                help=argparse.SUPPRESS)
    return parser
