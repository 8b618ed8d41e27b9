"""Generation config of a model, without the settings that transformers refuses to write: an export would fail at its
end."""
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file

from lightrft.utils.hub import model_folder, read_object

NAME = "generation_config.json"
_FIRST = ("do_sample", "num_beams")  # others have a meaning with certain values of these alone


def declared(path: str) -> dict[str, Any]:
    """Read the generation settings of the model at ``path``: of generation_config.json, else of config.json, where
    older models have them.

    Raises:
        UserError: the file is no JSON object.
    """
    if (file := _file(path, NAME)) is not None:
        return read_object(file)
    own = _file(path, "config.json")
    known = GenerationConfig().to_dict().keys()
    return {name: value for name, value in read_object(own).items() if name in known} if own is not None else {}


def _file(path: str, name: str) -> Path | None:
    folder = model_folder(path)
    if folder is not None:
        return folder / name if (folder / name).is_file() else None
    found = cached_file(path, name, _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_missing_entries=False,
                        _raise_exceptions_for_connection_errors=False)  # yapf: disable
    return Path(found) if found else None


def fault(values: dict[str, Any]) -> str | None:
    """Return the reason why transformers does not load or does not write the settings ``values``; None if it does."""
    try:
        GenerationConfig(**values).validate(strict=True)
    except (ValueError, TypeError, AttributeError) as error:
        lines = [line.removeprefix("- ") for line in str(error).splitlines() if line.strip()]
        return (lines[1:] or lines)[0]  # below a title
    return None


def valid_part(values: dict[str, Any]) -> tuple[GenerationConfig, list[str]]:
    """Return a generation config of as many of ``values`` as are valid together, and the names of the others.

    What transformers generates stays the same: settings that contradict ``do_sample`` or ``num_beams`` have no effect.
    """
    valid: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: (name not in _FIRST, name)):
        if fault(valid | {name: values[name]}) is None:
            valid[name] = values[name]
    return GenerationConfig(**valid), [name for name in values if name not in valid]


def replacement(path: str) -> dict[str, GenerationConfig]:
    """Return the argument of ``from_pretrained`` that takes the place of invalid settings of the model at ``path``;
    none for valid ones."""
    values = declared(path)
    return {} if fault(values) is None else {"generation_config": valid_part(values)[0]}
