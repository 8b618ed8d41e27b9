"""Questions of the package reasoning-gym as rows: ``reasoning_gym:NAME?size=500&OPTION=VALUE``."""
import json
from dataclasses import fields
from typing import Any
from urllib.parse import parse_qsl

from lightrft.datasets.row_formats import DataError, Row
from lightrft.utils.errors import CaptureException, did_you_mean, first_line, install_command

PREFIX = "reasoning_gym:"
LABEL = "reasoning_gym_rule"
_SEED = {"train": 0}  # questions of the seed s are those of s, s + 1, ...; so other splits begin far away
_FAR = 1 << 30


def reasoning_gym_rows(spec: str, split: str) -> list[Row]:
    """Make the questions of an entry; each row has what its scorer reads as JSON in ``extra_info.entry``.

    Source: Stojanovski et al. 2025, arXiv:2505.24760.

    Args:
        split: chooses the seed, unless the entry has one.

    Raises:
        DataError: the package is missing, or has no such data set or option.
    """
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    made = _made(spec, name, {"seed": _SEED.get(split, _FAR)} | _values(spec, query))
    return [_row(name, split, index, entry) for index, entry in enumerate(made)]


def _values(spec: str, query: str) -> dict[str, Any]:
    import yaml  # the doctor looks at it
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        return {option: yaml.safe_load(value) for option, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"{spec}: {query!r} is no list of options ({first_line(error)}). Write NAME?size=500&seed=1") from error


def _made(spec: str, name: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the questions and answers of a data set as the package makes them."""
    known = _data_sets(spec)
    if name not in known:
        raise DataError(f"{spec}: reasoning-gym has no data set {name!r}{did_you_mean(name, known)}")
    options = {field.name for field in fields(known[name][1])}
    for option in values:
        if option not in options:
            raise DataError(f"{spec}: {name} has no option {option!r}{did_you_mean(option, options)}; it has "
                            f"{', '.join(sorted(options))}")
    import reasoning_gym
    with CaptureException() as captured:
        return [*reasoning_gym.create_dataset(name, **values)]
    raise DataError(f"{spec}: {name} does not take {values}: {first_line(captured.cause or ValueError())}. Correct the "
                    "options")


def _data_sets(spec: str) -> Any:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            f"{spec} needs the package reasoning-gym ({error}); run: {install_command('reasoning')}") from error
    return DATASETS


def _row(name: str, split: str, index: int, entry: dict[str, Any]) -> Row:
    info = {"split": split, "index": index, "entry": json.dumps(entry, default=str)}
    return {"data_source": f"reasoning_gym/{name}", "prompt": entry["question"], "label": LABEL,
            "reference": str(entry["answer"]), "extra_info": info}  # yapf: disable
