"""Command line -> option tree: defaults < script < presets < ``--config`` files < flags, each with its provenance."""
import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from lightrft.config.compat import ALIASES, grant_without, nearest, one_line_per_fact, refusal
from lightrft.config.files import convert_options, plugins_of, read_options
from lightrft.config.flags import add_tree
from lightrft.config.help import HELP, HelpAction
from lightrft.config.layers import Layer, resolve
from lightrft.config.options import ConfigError
from lightrft.config.plugins import import_plugins, listed, Plugins
from lightrft.config.run_folders import with_models_of_runs
from lightrft.config.schema import Config
from lightrft.config.synonyms import in_own_flags
from lightrft.config.tree import RESERVED, build, groups, options
from lightrft.config.verl_words import refusal_of_verl
from lightrft.utils.errors import (absent_packages_are_expected, at_prompt, did_you_mean, ExpectedError, leave_error,
                                   UserError)
from lightrft.utils.launcher import adopt_launcher
from lightrft.utils.logging import each_line_once, silent

Provenance = dict[str, str]


class ParsedConfig(NamedTuple):
    """Result of parsing the command line, or keywords of a program.

    ``provenance[option]`` begins with default, script, ``recipe NAME``, stages, ``semantics NAME``, ``yaml:PATH``,
    flag, keyword, "samples of a rollout" or "--zero_stage"; the value that a preset would have given follows after a
    semicolon.
    """
    config: Any
    provenance: Provenance
    dry_run: bool
    plugins: list[str]
    plan_gpus: str = ""  # the machine that a dry run is for, if it is another one
    prog: str | None = None  # name of the program in messages; None: that of the script
    keywords: Mapping[str, str] | None = None  # option -> keyword, where they differ; None: it comes from flags
    foreign: bool = False  # the command line has flags of another trainer

    @contextmanager
    def own_words(self) -> Iterator[None]:
        """Let errors name the options as the user gave them: flags, or keywords."""
        if self.keywords is None:
            yield
            return
        with keyword_words(type(self.config), self.keywords):
            yield


Further = Callable[[ParsedConfig], Iterable[str]]
"""Yields what else is wrong with a command line that has problems."""


class _Parser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` where argparse exits."""

    def error(self, message: str) -> NoReturn:
        """Raise the error; argparse calls this for every error of the command line."""
        raise ConfigError(message.removeprefix("argument "))

    def read(self, words: list[str], problems: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the flags in ``words``, and the words that are none. A flag that cannot be read is left
        out, and what is wrong with it is added to ``problems``."""
        with silent():  # the notices come once, in the end
            while error := self._error(words):
                problems += [text for text in error.problems if text not in problems]
                words = _without(words, error)
        namespace, rest = self.parse_known_args(words)
        return vars(namespace), rest

    def _error(self, words: list[str]) -> ConfigError | None:
        """Return the first error of ``words``."""
        try:
            self.parse_known_args(words)
            return None
        except ConfigError as error:
            return error


def _parser(prog: str | None, description: str, tree: type, defaults: dict[str, Any]) -> _Parser:
    parser = _Parser(prog=prog, description=description or None, allow_abbrev=False, add_help=False,
                     usage="%(prog)s [--config FILE.yaml] [--option value ...]",
                     parents=[_flags(tree, *groups(tree).values())])  # yapf: disable
    parser.add_argument("-h", "--help", nargs="?", const="", action=HelpAction, tree=tree, defaults=defaults,
                        metavar="WHAT", help=HELP)
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE.yaml",
        help="read options from a YAML file, nested by group or flat; flags win; a later file wins over an earlier")
    parser.add_argument(
        "--plugin", action="extend", nargs="+", default=[], metavar="FILE.py",
        help="import Python files, or modules by name, that register algorithms (and their options), optimizers, "
        "rewards, data sources or numbers of responses; several are separated by spaces or commas, and the flag may be "
        "given again")
    parser.add_argument("--dry_run", action="store_true",
                        help="print the resolved configuration, batch sizes, memory and time estimates, and exit")
    parser.add_argument(
        "--plan_gpus", default="", metavar="NxGPU",
        help="with --dry_run: plan for other GPUs than those here, e.g. 8xH100, 1x24 (GiB), 2x8xH100 (two machines)")
    return parser


@lru_cache(maxsize=32)  # to build it takes longer than all else of a command line
def _flags(tree: type, *classes: type) -> _Parser:
    """Return a parser of the flags of ``tree``, the ``classes`` of whose groups differ with the options of plug-ins."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_tree(parser, tree, {}, quiet=True)
    return parser


def _of_verl(word: str, tree: type) -> str | None:
    """Explain a word such as actor_rollout_ref.rollout.n=8, which is an option of verl; None for another."""
    name, _, value = word.lstrip("+").partition("=")
    return refusal_of_verl(name, value, options(tree))


def _unknown_words(words: list[str], known: list[str], tree: type) -> list[str]:
    """One sentence per unknown flag: the remedy for a flag of the original LightRFT, or the nearest known flag."""
    flags = [word.split("=", 1)[0] for word in words if word.startswith("--")]
    if not flags and (explained := [text for word in words if (text := _of_one_hyphen(word, known))]):
        return explained
    if not flags:
        theirs = [_of_verl(word, tree) for word in words]
        return [text or f"unexpected value {word!r}: options are given as --name value" +
                "; docs/coming_from.md translates those of verl" * bool(re.match(r"\+*\w+\.[\w.]+=", word))
                for word, text in zip(words, theirs)]  # yapf: disable
    names = [flag.removeprefix("--") for flag in flags]
    return [refusal(name, known) or f"unknown flag --{name}{nearest(name, known, '--')}" for name in names]


def _of_one_hyphen(word: str, known: list[str]) -> str | None:
    """Explain a flag that begins with one hyphen; None for another word."""
    name = re.match(r"-([A-Za-z]\w*)", word)
    if name is None:
        return None
    meant = f" (did you mean --{name[1]}?)" if name[1] in known else nearest(name[1], known, "--")
    return f"unknown flag -{name[1]}{meant}; an option begins with two hyphens"


def _with_hyphens(word: str, known: list[str], problems: list[str]) -> str:
    """Return ``word``; where it is an option behind a dash of typeset texts, with hyphens, and ``problems`` gets that.
    """
    dash = re.match(r"-?[\u2010-\u2015\u2212]+(?=(\w+)(=|$))", word)
    if dash is None or dash[1] not in known:
        return word
    problems.append(f"{dash[0]}{dash[1]}: begins with a dash of typeset text; write --{dash[1]}, with two hyphens")
    return f"--{word[dash.end():]}"


def _without(words: list[str], error: ConfigError) -> list[str]:
    """Leave out the first flag among ``words`` that ``error`` begins with, and the words up to the next flag."""
    name = re.split(r"[:\s]", str(error))[0].lstrip("-")
    flags = [word.partition("=")[0].lstrip("-") if word.startswith("--") else "" for word in words]
    if name not in flags:
        raise error
    first = flags.index(name)
    return words[:first] + words[next((at for at in range(first + 1, len(words)) if flags[at]), len(words)):]


def _script_defaults(defaults: dict[str, Any] | None, tree: type) -> dict[str, Any]:
    known = options(tree)
    for name in defaults or {}:
        if name not in known:
            raise ConfigError(f"script default {name!r} is not an option{did_you_mean(name, known)}")
    return {name: known[name].convert(value) for name, value in (defaults or {}).items()}


def _plugins(argv: Sequence[str] | None) -> list[str]:
    """Collect the plugins that the ``--config`` files, then the command line name, each once."""
    early = _Parser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", action="append", default=[])
    early.add_argument("--plugin", action="extend", nargs="+", default=[])
    given, _ = early.parse_known_args(argv)
    named = [name for path in given.config for name in _plugins_of(path)]
    return list(dict.fromkeys(named + listed(given.plugin)))


def _plugins_of(path: str) -> list[str]:
    """Read the plugins that a YAML file names; what is wrong with the file is told where its options are read."""
    try:
        return plugins_of(path)
    except ConfigError:
        return []


def _parse(parser: _Parser, argv: Sequence[str] | None, tree: type, defaults: dict[str, Any], plugins: list[str],
           further: Further, foreign: bool) -> ParsedConfig:
    known = [*options(tree), *ALIASES, *RESERVED]
    known += [f"no_{name}" for name, option in options(tree).items() if option.kind is bool]
    dotted = [(word, _of_verl(word, tree)) for word in argv or () if re.match(r"\+*\w+(\.\w+)+=", word)]
    theirs = {word: answer for word, answer in dotted if answer}
    problems = [answer for _, answer in dotted if answer]  # behind a flag of several words they would be its values
    words = [_with_hyphens(word, known, problems) for word in argv or () if word not in theirs]
    with one_line_per_fact() as granted:
        flags, rest = parser.read(words, problems)
        problems += [*_unknown_words(rest, known, tree), *grant_without(flags)]
    layers = [layer for path in flags.pop("config") for layer in _file_layers(path, tree, problems)]
    dry_run, _, plan_gpus = flags.pop("dry_run"), flags.pop("plugin"), flags.pop("plan_gpus")
    if plan_gpus and not dry_run:
        problems += [f"--plan_gpus {plan_gpus}: plans a run for GPUs that are not here; add --dry_run or drop it"]
    try:
        values, provenance = resolve(tree, defaults, [*layers, Layer("flag", flags)])
        config = build(tree, with_models_of_runs(tree, values))
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    foreign |= bool(granted) or any(re.search("is (not )?an option (here|of another)", text) for text in problems)
    parsed = ParsedConfig(config, provenance, dry_run, plugins, plan_gpus, foreign=foreign)
    if problems:
        raise ConfigError([*problems, *_independent(further(parsed), problems, provenance)])
    return parsed


def _file_layers(path: str, tree: type, problems: list[str]) -> list[Layer]:
    """Read a YAML file of options; what is wrong with some of them is added to ``problems``.

    Raises:
        ConfigError: the file cannot be read, so that what else is wrong is not known.
    """
    try:
        values, wrong = read_options(path, tree)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    problems += wrong
    return [Layer(f"yaml:{path}", values)]


def _independent(further: Iterable[str], problems: list[str], provenance: Provenance) -> list[str]:
    """Leave out what follows from ``problems``: what names an option that they name and that nothing has set."""
    unset = {name for name in re.findall(r"--(\w+)", " ".join(problems)) if provenance.get(name) == "default"}
    return [text for text in further if not unset & set(re.findall(r"--(\w+)", text))]


@contextmanager
def exit_on_config_error(prog: str | None = None) -> Iterator[None]:
    """Turn a :class:`UserError` into one message (of one rank per machine) and exit code 2.

    The message goes to stderr, or under torchrun to the end of its report. In a session at a prompt, which would end,
    the error is raised.
    """
    try:
        with absent_packages_are_expected():
            yield
    except UserError as error:
        if at_prompt():
            raise
        speaks = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
        text = f"{prog or os.path.basename(sys.argv[0])}: error: {error}"
        if not leave_error(text, speaks) and speaks:
            hint = "See --help for the options.\n" if isinstance(error, ConfigError) else ""
            sys.stderr.write(f"{text}\n{hint}")
        raise SystemExit(2) from None


@contextmanager
def keyword_words(tree: type, keywords: Mapping[str, str]) -> Iterator[None]:
    """Let expected errors name the options of ``tree`` by keyword: ``n_samples_per_prompt``, not
    ``--n_samples_per_prompt``.

    Args:
        keywords: option, or another flag -> keyword, where they differ.
    """
    known = options(tree)

    def word(flag: re.Match[str]) -> str:
        if flag[1] in keywords or flag[1] in known:
            return keywords.get(flag[1], flag[1])
        name = flag[1].removeprefix("no_")
        return f"{name}=False" if name in known else flag[0]

    try:
        yield
    except ExpectedError as error:
        if isinstance(error, ConfigError):
            error.problems = [re.sub(r"--(\w+)", word, problem) for problem in error.problems]
        error.args = (re.sub(r"--(\w+)", word, str(error)), *error.args[1:])
        raise


def parse_config(argv: Sequence[str] | None = None, prog: str | None = None, defaults: dict[str, Any] | None = None,
                 description: str = "", tree: type = Config, further: Further = lambda *_: ()) -> ParsedConfig:
    """Build the option tree from the command line, before any process group exists.

    Args:
        argv: words of the command line; ``None`` takes ``sys.argv[1:]``.
        defaults: values of this script, by option name; they win over the tree's and over a recipe that they name, and
            lose to YAML, flags and the presets that those name.
        tree: the dataclass of option groups; :class:`lightrft.config.schema.Config` or a script's own.
        further: what else is wrong with a command line that has problems, so that one message has all of them.

    Raises:
        SystemExit: 2 with every problem on stderr; 0 after ``--help``.
        ConfigError: in place of the 2, in a session at a prompt.
    """
    adopt_launcher()
    with exit_on_config_error(prog), each_line_once():
        words = [*(sys.argv[1:] if argv is None else argv)]
        argv = in_own_flags(words, tree)
        plugins = _plugins(argv)
        import_plugins(plugins, tree)  # first, because they may declare options
        given = _script_defaults(defaults, tree)
        parsed = _parse(_parser(prog, description, tree, given), argv, tree, given, plugins, further, argv != words)
        return parsed._replace(prog=prog)


def parse_keywords(given: dict[str, Any], tree: type = Config, plugins: Plugins = (),
                   defaults: dict[str, Any] | None = None, keywords: Mapping[str, str] | None = None) -> ParsedConfig:
    """Build the option tree from Python values by option name, as :func:`parse_config` does from flags.

    Args:
        keywords: option -> keyword, where they differ; errors have the keyword.

    Raises:
        ConfigError: with every problem.
    """
    keywords = keywords or {}
    with keyword_words(tree, keywords):
        import_plugins(names := listed(plugins), tree)
        values, provenance = resolve(tree, _script_defaults(defaults, tree),
                                     [Layer("keyword", convert_options(given, tree))])
        config = build(tree, with_models_of_runs(tree, values))
        return ParsedConfig(config, provenance, False, names, keywords=keywords)
