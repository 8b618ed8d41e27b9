"""Rules of the paths that options name: of models, data sets, evaluation sets, programs and templates."""
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightrft.config.options import ConfigError
from lightrft.datasets.pair_sources import parse_source
from lightrft.datasets.suites import parse_suite
from lightrft.rewards.spec import parse_models
from lightrft.utils.errors import did_you_mean, meant_path, UserError
from lightrft.utils.hub import looks_local

DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")


def folder(name: str, paths: str | list[str] | None) -> Iterator[str]:
    """Yield the paths of models that can only be local folders and are none."""
    for path in [paths] if isinstance(paths, str) else paths or ():
        local = Path(path).expanduser()
        if looks_local(path) and not local.is_dir():
            yield f"--{name} {path}: no such folder{meant_path(local)}"


def sources(name: str, entries: list[str]) -> Iterator[str]:
    """Yield local paths that do not exist, of data entries ``path`` or ``path@data_dir``."""
    for entry in entries:
        try:
            named = parse_source(entry)[1].rsplit("@", 1)[0]
        except UserError as error:
            yield f"--{name} {entry}: {error}"
            continue
        path = Path(named).expanduser()
        named_like_a_file = path.suffix in DATA_SUFFIXES or path.suffix and len(path.parts) == 1  # no hub id has one
        if not path.exists() and (looks_local(named) or named_like_a_file):
            yield f"--{name} {entry}: no such file or folder{_beside(path)}"


def _beside(path: Path) -> str:
    """Name the file beside an absent one that was meant: of its stem in another form, else of the nearest name."""
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    forms = [name for name in siblings if name in (f"{path.stem}{suffix}" for suffix in DATA_SUFFIXES)]
    return did_you_mean(path.name, forms, cutoff=0.0) or meant_path(path)


def suites(name: str, entries: list[str]) -> Iterator[str]:
    """Yield unknown names of public evaluation sets, local paths that do not exist, and repeated names."""
    names = [entry.partition("=")[0] for entry in entries]
    for entry in entries:
        try:
            suite, path = parse_suite(entry)
        except ConfigError as error:
            yield str(error)
            continue
        if path and not Path(path.rsplit("@", 1)[0]).expanduser().exists():
            yield f"--{name} {entry}: no such file or folder; {suite} alone is read from the hub"
        if names.count(suite) > 1:
            yield f"--{name} {','.join(entries)}: {suite} is named twice; name it once"


def template(name: str, path: str | None) -> Iterator[str]:
    """Yield a problem of a template's path that can only be a file and is none, not of the text of one."""
    named = path and "{{" not in path and (looks_local(path) or path.endswith((".jinja", ".j2")))
    if path and named:
        yield from file(name, path, path)


def program(name: str, entry: str | None) -> Iterator[str]:
    """Yield the absent Python file of an entry ``path.py[:name][=weight]``; other entries are names."""
    path = re.match(r"(.+\.py)(:\w+)?(=|$)", entry or "")
    if entry and path:
        yield from file(name, entry, path[1])


def file(name: str, entry: str, path: str) -> Iterator[str]:
    """Yield that ``path``, of ``entry``, is no file."""
    local = Path(path).expanduser()
    if not local.is_file():
        yield f"--{name} {entry}: no such file{meant_path(local)}"


def models(name: str, entries: list[str]) -> Iterator[str]:
    """Yield ``{}`` in place of a model, and the paths of named models that can only be local folders and are none."""
    for path in parse_models(entries).values():
        if path == "{}":
            yield f"--{name} {{}}: names no model; rule and file rewards need none, drop the flag"
        yield from folder(name, path)


PATHS: dict[str, Callable[[str, Any], Iterator[str]]] = {
    "model": folder, "models": models, "program": program, "rows": sources, "suites": suites, "template": template
}
"""Kind of the paths of an option -> their rule, for the name of the option and its value."""
