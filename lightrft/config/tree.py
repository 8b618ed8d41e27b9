"""Option trees: dataclasses of groups, each a dataclass of options, and what plugins and algorithms add to a group."""
import argparse
import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from lightrft.config import options as declaration
from lightrft.config.compat import ALIASES
from lightrft.config.options import PARSERS, ConfigError, Option, show
from lightrft.utils.errors import did_you_mean

G = TypeVar("G")
RESERVED = ("config", "plugin", "dry_run", "plan_gpus", "help")  # flags that are no options
PACKAGE = Path(__file__).parents[1]
_EXTENSIONS: dict[type, dict[str, type]] = {}  # group -> name of the extension -> dataclass
_FOLDERS: dict[type, str] = {}  # group -> folder whose files extend it


def group(cls: type, free: bool = False) -> Any:
    """Declare a group of a tree; a resumed run may change all options of a ``free`` one."""
    return field(default_factory=lambda: extended(cls)(), metadata={"free": free})


def extended_in(folder: str) -> Callable[[type[G]], type[G]]:
    """Let the files of a folder of the package declare further options of the decorated group (see :func:`extend`), and
    of the groups derived from it."""

    def add(cls: type[G]) -> type[G]:
        _FOLDERS[cls] = folder
        return cls

    return add


def _option(group: str, owner: str, spec: Field, annotation: Any, free: bool) -> Option:
    many = get_origin(annotation) is list
    inner = (dict, ) if get_origin(annotation) is dict else get_args(annotation) or (annotation, )
    kind = next(t for t in inner if t is not NoneType)
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    known = dict(spec.metadata)
    word = "json" if kind is dict else kind.__name__
    return Option(group, owner, spec.name, f"--{spec.name}", kind, word, many, NoneType in inner, default,
                  **known | {"free": known["free"] or free})


def _title(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _owner(cls: type, spec: Field) -> str:
    """Name the class that declares a field of the dataclass ``cls``; a class shares the fields that it inherits."""
    return _title([one for one in cls.__mro__ if vars(one).get("__dataclass_fields__", {}).get(spec.name) is spec][-1])


def group_options(cls: type, group: str = "", free: bool = False) -> dict[str, Option]:
    """Read the options of one group (a dataclass such as ``StrategyConfig``), by name; all are free with ``free``."""
    return dict(_read_options(cls, group, free))


@cache
def _read_options(cls: type, group: str, free: bool) -> tuple[tuple[str, Option], ...]:
    hints = get_type_hints(cls)
    return tuple((spec.name, _option(group, _owner(cls, spec), spec, hints[spec.name], free)) for spec in fields(cls))


def groups(tree: type) -> dict[str, type]:
    """Map the field names of a tree (such as ``Config``) to the dataclasses of its groups, extensions included."""
    hints = _hints(tree)
    return {spec.name: extended(hints[spec.name]) for spec in fields(tree)}


_hints = cache(get_type_hints)  # of a tree; they are asked for many times per run


def options(tree: Any) -> dict[str, Option]:
    """Collect every option of a tree, or of an instance of one, by name.

    Raises:
        ConfigError: two groups have an option of the same name or flag, or an extension needs an option that the tree
            does not have.
    """
    instance = not isinstance(tree, type)
    classes = {name: type(part) for name, part in vars(tree).items()} if instance else groups(tree)
    parts = ((classes[spec.name], spec.name, spec.metadata.get("free", False)) for spec in fields(tree))
    return dict(_options_of(*parts))


@cache
def _options_of(*parts: tuple[type, str, bool]) -> dict[str, Option]:
    """Collect the options of ``parts``, the arguments of :func:`group_options`; see :func:`options`."""
    found: dict[str, Option] = {}
    for part in parts:
        for name, option in group_options(*part).items():
            if name in found:
                raise ConfigError(f"--{name} is declared twice, by {found[name].owner} and {option.owner}; rename one "
                                  "of them")
            found[name] = option
    for problem in _tree_problems(found):
        raise ConfigError(problem)
    return found


def _tree_problems(known: dict[str, Option]) -> Iterator[str]:
    """Yield the problems of declarations that only the other options of the tree show."""
    extensions = {title for added in _EXTENSIONS.values() for title in added}
    for name, option in known.items():
        positive = known.get(name.removeprefix("no_"), option)
        if positive is not option and positive.kind is bool:
            yield (f"{option.owner}.{name}: --{name} is the flag that switches off {positive.flag} "
                   f"({positive.owner}); choose another name")
        for needed in option.needed:
            if needed not in known and option.owner in extensions:
                yield (f"{option.owner}.{name}: needs={option.needs!r}: there is no option "
                       f"{needed}{did_you_mean(needed, known)}; name one, or drop needs")


def extend(group: type, extension: Any) -> tuple[str, ...]:
    """Add the options of ``extension`` to a group of every tree of this process, and return their names.

    Args:
        extension: a dataclass derived from ``group``, with one line per option. A class that is declared again, as when
            its file was read before it is imported, changes nothing unless its lines differ.

    Raises:
        ConfigError: it is no such class, a line is not a complete option, or the name of one is taken.
    """
    title = _title(extension)
    if "__dataclass_fields__" not in vars(extension) or not issubclass(extension, group):
        raise ConfigError(f"{title}: options are declared in a @dataclass that is derived from {group.__name__}")
    known = _EXTENSIONS.get(group, {})
    others = {key: one for key, one in known.items() if key != title}
    bases: list[Any] = [group, *others.values()]
    taken = {spec.name: (spec, _owner(cls, spec)) for cls in bases for spec in fields(cls)}
    own = [spec for spec in fields(extension) if spec.name not in taken or taken[spec.name][0] is not spec]
    for spec in own:
        rival = f" ({taken[spec.name][1]})" if spec.name in taken else ""
        if problem := _line_problem(spec, get_type_hints(extension)[spec.name], rival):
            raise ConfigError(f"{title}.{spec.name}: {problem}")
    if title not in known or group_options(known[title]) != group_options(extension):
        _EXTENSIONS[group] = others | {title: extension}
    return tuple(spec.name for spec in own)


def declare(group: type, extension: Any, reads: Iterable[str] | None) -> tuple[str, ...]:
    """Add the options of an entry of a registry to a group, and return their names; none for an ``extension`` of None.

    Raises:
        ConfigError: one of them is no complete option, or ``reads`` names an option that the group does not have.
    """
    own = extend(group, extension) if extension else ()
    known = [spec.name for spec in fields(extended(group))]
    for name in reads or ():
        if name not in known:
            raise ConfigError(f"reads={reads}: {group.__name__} has no option {name}{did_you_mean(name, known)}")
    return own


def _line_problem(spec: Field, annotation: Any, rival: str) -> str:
    """Name the problem of a line of an extension, or return an empty string; ``rival`` has the same name."""
    if rival or spec.name in RESERVED or spec.name in ALIASES:
        return f"there is an option --{spec.name} already{rival}; choose another name"
    if "preset" not in spec.metadata:
        return "declare it with option(default, help)"
    many = get_origin(annotation) is list
    kinds = [t for t in get_args(annotation) or (annotation, ) if t is not NoneType]
    if len(kinds) != 1 or kinds[0] not in PARSERS or get_origin(annotation) not in (None, list, Union, UnionType):
        return f"the type is {annotation}; nearest valid: bool, int, float, str, one of them | None, or a list of one"
    if many and not callable(spec.default_factory):
        return "the default of a list is a list"
    return _option("", "", spec, annotation, False).mistake()


def extended(group: type) -> type:
    """Return ``group``, or a dataclass derived from it that has the options of its extensions too, and of those of the
    classes that it is derived from.

    Raises:
        ConfigError: ``group`` itself has an option of the name of such an inherited one.
    """
    for base in filter(_FOLDERS.__contains__, group.__mro__):
        _read_folder(base, PACKAGE, _FOLDERS[base])
    own = tuple(reversed(_EXTENSIONS.get(group, {}).values()))
    inherited = tuple(cls for base in group.__mro__[1:] for cls in reversed(_EXTENSIONS.get(base, {}).values()))
    return _combined(group, own, inherited) if own or inherited else group


@cache
def _read_folder(group: type, package: Path, folder: str) -> None:
    """Extend ``group`` by the dataclasses that the files of a folder of the ``package`` derive from it.

    Only these classes are executed. An import of the files would load torch, which ``--help`` does not wait for.
    """
    for path in sorted((package / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if f"({group.__name__}):" in text else ():
            if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == [group.__name__]:
                module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
                names = vars(declaration) | {"__name__": module, group.__name__: group}
                exec(compile(ast.Module([node], []), path, "exec"), names)
                extend(group, names[node.name])


@cache
def _combined(group: type, own: tuple[type, ...], inherited: tuple[type, ...]) -> type:
    made = make_dataclass(group.__name__, [], bases=(*own, group, *inherited),
                          namespace={"__module__": group.__module__, "__doc__": group.__doc__})
    specs = {spec.name: spec for spec in fields(made)}
    for cls in inherited:
        for spec in fields(cls):
            if _owner(cls, spec) == _title(cls) and specs[spec.name] is not spec:
                raise ConfigError(f"--{spec.name} is declared twice, by {_owner(made, specs[spec.name])} and "
                                  f"{_title(cls)}; rename one of them")
    return made


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


def with_aliases(given: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of a namespace with those of the options that aliases among them set; an option that has
    another value than its default keeps it."""
    values = dict(given)
    for alias, (name, value) in ALIASES.items():
        if values.get(alias) is True and name in known and values.get(name) in (None, known[name].default):
            values[name] = value
    return values


def group_from_args(cls: type[G], args: argparse.Namespace) -> G:
    """Build one group from a namespace of :func:`lightrft.utils.cli_args.add_arguments`, or of a script's own parser.

    An option that is missing, or ``None`` where it has no such value, takes its default. Values are type-checked.

    Raises:
        ConfigError: with the option, the value and what was expected; also for a preset, which only
            :func:`lightrft.config.cli.parse_config` can put between defaults and flags.
    """
    cls = extended(cls)
    known = group_options(cls)
    given = with_aliases(vars(args), known)
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
