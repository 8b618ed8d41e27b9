"""Levels of ``--help``: the options that most people set, all, those of a group, and one option with its details."""
import argparse
import re
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, NoReturn

from lightrft.config.compat import refusal
from lightrft.config.flags import add_tree
from lightrft.config.options import Option, in_words, show
from lightrft.config.tree import RESERVED, groups, options
from lightrft.utils.errors import did_you_mean

HELP = ("show the most common options; with WHAT (all, a GROUP, the name of an option, or a word such as video) show "
        "those")
SHORTEST = 3  # letters of a word that is looked up in descriptions
PACKAGE = __package__.partition(".")[0] + "."


class Formatter(argparse.HelpFormatter):
    """Formats the help as wide as the terminal, at most 120 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=_columns())


class HelpAction(argparse.Action):
    """Prints the help that is asked for, and exits.

    Args:
        tree: its options are those of the parser.
        defaults: values, by option name, that replace those of the tree.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, tree: type, defaults: dict[str, Any],
                 **kwargs: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)
        self.tree, self.defaults = tree, defaults

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Any] | None, option_string: str | None = None) -> NoReturn:
        what, known = str(values or "").lstrip("-").replace("-", "_"), options(self.tree)
        if what in known and what not in groups(self.tree):
            text = _details(known[what], self.defaults.get(what, known[what].default))
        elif shown := _selected(what, self.tree):
            theirs = None if what in ("", "all", *groups(self.tree)) else refusal(what, known)
            epilog = "" if what else _further(self.tree, len(known) - len(shown))
            text = f"{theirs}\n\n" * bool(theirs) + self._page(parser, shown, epilog)
        else:
            parser.exit(2, f"{parser.prog}: error: {_unknown(str(values), self.tree)}\n")
        sys.stdout.write(text)
        parser.exit()

    def _page(self, parser: argparse.ArgumentParser, shown: set[str], epilog: str) -> str:
        page = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, description=parser.description,
                                       add_help=False, formatter_class=Formatter)  # yapf: disable
        for action in parser._actions:
            if action.dest in RESERVED:
                page._add_action(action)
        add_tree(page, self.tree, self.defaults, quiet=False, skip=set(options(self.tree)) - shown)
        return page.format_help() + epilog


def _selected(what: str, tree: type) -> set[str]:
    """Return the names of the options that a page shows; the short page has those of plugins too. What is no group is
    the start of a word in names or descriptions."""
    known = options(tree)
    if what in ("", "all"):
        return {name for name, option in known.items() if what or option.common or not option.owner.startswith(PACKAGE)}
    if group := {name for name, option in known.items() if option.group == what}:
        return group
    said = re.compile(rf"\b{re.escape(what.lower().replace('_', ' '))}")
    return set() if len(what) < SHORTEST else {
        name for name, option in known.items() if said.search(f"{name} {option.help}".lower().replace("_", " "))
    }


def _further(tree: type, left: int) -> str:
    text = (f"{left} further options: --help all. Those of a group: --help GROUP, of {', '.join(groups(tree))}. "
            "One of them: --help NAME. Those about something: --help WORD. Options of a plugin: add --plugin MODULE.")
    return f"\n{fill(text, _columns())}\n"


def _details(option: Option, default: Any) -> str:
    """Describe one option: everything that its line in the schema holds."""
    kind = "true|false" if option.type_name == "bool" else option.type_name
    facts = {
        "default": show(default), "range": in_words(option.within), "reason": option.why, "needs":
        option.needs and f"--{option.needs}", "read by": ", ".join(option.read_by), "group": option.group, "off":
        f"--no_{option.name}" if option.kind is bool else "", "declared by":
        "" if option.owner.startswith(PACKAGE) else option.owner
    }  # yapf: disable
    lines = [f"  {name:<12} {value}" for name, value in facts.items() if value]
    text = fill(option.help, _columns(), initial_indent="  ", subsequent_indent="  ")
    return "\n".join([f"{option.flag} {kind}{' ...' if option.many else ''}", text, *lines]) + "\n"


def _unknown(what: str, tree: type) -> str:
    known = [*options(tree), *groups(tree), "all"]
    return refusal(what.lstrip("-"), known) or (f"--help {what}: no such option or group"
                                                f"{did_you_mean(what, known)}; --help all shows all of them")


def _columns() -> int:
    return min(get_terminal_size().columns, 120) - 2
