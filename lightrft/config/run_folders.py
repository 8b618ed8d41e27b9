"""Folders of runs in place of models: ``--pretrain SAVE_PATH`` reads the model that the run has exported."""
from pathlib import Path
from typing import Any

from lightrft.config.tree import options
from lightrft.utils.logging import get_logger

EXPORT = "hf"  # folder of the final model in that of a run


def model_of(path: str) -> str:
    """Return the folder of the model of a run, for the folder of that run; another path as it is."""
    folder = Path(path).expanduser()
    inside = folder / EXPORT
    is_run = not (folder / "config.json").is_file() and (inside / "config.json").is_file()
    return str(Path(path) / EXPORT) if is_run else path


def named_model_of(entry: str) -> str:
    """Do the same for ``path`` or ``name=path``."""
    name, equals, path = entry.rpartition("=")
    return f"{name}{equals}{model_of(path)}"


def with_models_of_runs(tree: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options with models in place of runs, and log each.

    Args:
        values: by option name; entries of options for several models may be NAME=PATH.
    """
    replaced = dict(values)
    for name, option in options(tree).items():
        if option.path in ("model", "models") and values.get(name):
            several = values[name] if option.many else [values[name]]
            models = [_entry(entry, option.flag) for entry in several]
            replaced[name] = models if option.many else models[0]
    return replaced


def _entry(entry: str, flag: str) -> str:
    model = named_model_of(entry)
    if model != entry:
        get_logger().info("%s %s: the folder of a run; its model in %s is read", flag,
                          entry.rpartition("=")[2],
                          model.rpartition("=")[2])
    return model
