"""YAML files of options: ``--config file.yaml`` and the ``config.yaml`` of a run."""
from pathlib import Path
from typing import Any

import yaml

from lightrft.config.compat import grant, nearest, of_alias, refusal
from lightrft.config.counterparts import ELSEWHERE
from lightrft.config.options import ConfigError
from lightrft.config.plugins import listed
from lightrft.config.shared_schema import grants
from lightrft.config.tree import group_options, groups, options
from lightrft.config.verl_words import leaves, refusal_of_verl, ROOTS
from lightrft.utils.errors import did_you_mean, meant_path

_OUTSIDE = {
    "plugin": "from Python give plugins=['my_file.py']",
    "config": "give the options of the file themselves; on the command line, --config FILE.yaml",
    "dry_run": "from Python call .plan(); on the command line, --dry_run",
    "plan_gpus": "on the command line --dry_run --plan_gpus 8xH100, from Python .plan(gpus=\"8xH100\")",
}  # names that the command line has beside the options

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: a fifth of the time; some builds lack it
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_LOADER):
    """Refuses a key that is given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping of ``node``; a repeated key raises ``ConstructorError``."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a word; put a text that begins with "
                    "a brace, such as {{...}}, in quotes", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice",
                                                        key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file{meant_path(path)}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: expected a mapping of options, found {type(loaded).__name__}")
    return loaded


def _unknown(key: Any, tree: type, group: str) -> str:
    known = options(tree)
    if group and key in known:
        return f"{group}.{key}: {key} belongs to the group {known[key].group}"
    if group:
        return f"unknown key {group}.{key}{did_you_mean(key, group_options(groups(tree)[group], group))}"
    if key in _OUTSIDE:
        return f"{key} is not an option of a run: {_OUTSIDE[key]}"
    return refusal(str(key), known) or f"unknown key {key}{nearest(str(key), [*known, *groups(tree)])}"


class _Reader:
    """Collects the options of one YAML document and every problem in it."""

    def __init__(self, tree: type) -> None:
        self.tree, self.known = tree, options(tree)
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []

    def document(self, loaded: dict[str, Any]) -> None:
        """Read the top level: groups (a mapping under a group's name) and flat options."""
        for key, value in loaded.items():
            if key in groups(self.tree) and isinstance(value, dict):
                for name, item in value.items():
                    if not (self._is_of_verl(key, name, item) and self._of_verl(f"{key}.{name}", item)):
                        self.entry(name, item, key)
            elif key in ROOTS and isinstance(value, dict) and self._of_verl(key, value):
                continue
            elif key in groups(self.tree) and key not in self.known:
                self.problems.append(f"{key} is a group of options: expected a mapping, got {value!r}")
            else:
                self.entry(key, value)

    def _is_of_verl(self, group: str, name: Any, value: Any) -> bool:
        """Return True for a key below ``group`` that verl has there, and this program has not."""
        if f"{group}.{name}" in ELSEWHERE:
            return name not in group_options(groups(self.tree)[group], group)
        return name not in self.known and bool(isinstance(value, dict) or refusal(f"{group}.{name}", self.known))

    def _of_verl(self, name: str, value: Any) -> bool:
        """Add the problems of a name of verl, or of a tree of them; return False if there is none."""
        words = leaves(value, name) if isinstance(value, dict) and value else [(name, value)]
        found = [text for word, item in words if (text := refusal_of_verl(word, item, self.known))]
        self.problems += found
        return bool(found)

    def entry(self, key: Any, value: Any, group: str = "") -> None:
        """Read one option."""
        if not group:
            key, value = of_alias(key, value)
        option = self.known.get(key)
        if option is None and not group and grant(str(key), value, grants(self.tree)):
            return
        if option is None or (group and option.group != group):
            self.problems.append(_unknown(key, self.tree, group))
        elif key in self.values:
            self.problems.append(f"{key} is given twice")
        else:
            try:
                self.values[key] = option.convert(value)
            except ConfigError as error:
                self.problems.append(str(error))


def plugins_of(path: str | Path) -> list[str]:
    """Read the plugins that a YAML file names."""
    return listed(_read(Path(path)).get("plugin") or [])


def convert_options(given: dict[str, Any], tree: type) -> dict[str, Any]:
    """Convert options given as Python values, by name or nested by group.

    Raises:
        ConfigError: with every problem: unknown names (and the nearest known), wrong types, options given twice.
    """
    reader = _Reader(tree)
    reader.document(given)
    if reader.problems:
        raise ConfigError(reader.problems)
    return reader.values


def load_config(path: str | Path, tree: type) -> dict[str, Any]:
    """Read the options of a YAML file, converted, by name.

    Keys are nested by group (``train: {seed: 1}``) or flat (``seed: 1``).

    Raises:
        ConfigError: with every problem of the file: unknown keys (and the nearest known), wrong types, repeated keys.
    """
    values, problems = read_options(path, tree)
    if problems:
        raise ConfigError(problems)
    return values


def read_options(path: str | Path, tree: type) -> tuple[dict[str, Any], list[str]]:
    """Read a YAML file as :func:`load_config` does; return the options that can be read, and what is wrong with others.

    Raises:
        ConfigError: the file cannot be read, or holds no mapping.
    """
    reader = _Reader(tree)
    reader.document({key: value for key, value in _read(Path(path)).items() if key != "plugin"})
    return reader.values, [f"--config {path}: {problem}" for problem in reader.problems]


def to_yaml(config: Any, plugins: list[str] | None = None) -> str:
    """Render the whole tree as YAML that ``--config`` reads back to an equal tree."""
    document: dict[str, Any] = {"plugin": list(plugins)} if plugins else {}
    for group in groups(type(config)):
        document[group] = dict(vars(vars(config)[group]))
    return yaml.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=110)


def save_config(config: Any, path: str | Path, plugins: list[str] | None = None) -> None:
    """Write the tree as YAML to ``path``; its folder is created."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(to_yaml(config, plugins), encoding="utf-8")
