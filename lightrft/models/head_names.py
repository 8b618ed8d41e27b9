"""Names of the heads in the weight files of a folder: reward models of other programs call their head as they like."""
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import safe_open, SafetensorError

from lightrft.config.options import show
from lightrft.utils.errors import UserError
from lightrft.utils.hub import model_folder

HEAD = re.compile(r"(?!lm_head\.)\w*(head|score|value|reward|classifier)\w*\.")
_TO_TOKENS = "lm_head.weight"  # the head of a language model


def heads_among(names: Iterable[str]) -> list[str]:
    """Return the names of the heads whose weights are among the tensors ``names``."""
    return sorted(name.removesuffix(".weight") for name in names if HEAD.match(name) and name.endswith(".weight"))


def tensor_names(path: str) -> set[str]:
    """Return the names of all tensors in the weight files of a folder. Of a hub id, and of files that cannot be read,
    none are known; loading them says why."""
    folder = model_folder(path)
    files = [*folder.glob("*.safetensors")] if folder else []
    if folder and not files:
        files = [*folder.glob("pytorch_model*.bin")]
    with suppress(SafetensorError, UnpicklingError, OSError, RuntimeError):
        return {name for file in files for name in _names_in(file)}
    return set()


def _names_in(file: Path) -> list[str]:
    if file.suffix == ".bin":
        return [*torch.load(file, map_location="meta", weights_only=True, mmap=True)]
    with safe_open(str(file), framework="pt") as opened:
        return [*opened.keys()]


def replaces_tokens(names: Iterable[str]) -> bool:
    """Return True if a decoder has a head for scores, and none for tokens."""
    return bool(heads_among(names)) and _TO_TOKENS not in {*names}


def checked_head(path: str, names: set[str], prefix: str) -> str:
    """Check that ``prefix`` is the one head among the tensors ``names`` that a model can be read with.

    Raises:
        UserError: names the heads that are there.
    """
    heads = heads_among(names)
    if names and f"{prefix}.weight" not in names:
        raise UserError(f"--value_head_prefix {prefix}: {path!r} has no {prefix}.weight; its heads: "
                        f"{show(heads) or 'none'}")
    if prefix != "score" and "score.weight" in names:
        raise UserError(f"--value_head_prefix {prefix}: {path!r} also has a head score; remove one of the two")
    if f"{prefix}.bias" in names:
        raise UserError(f"reward model {path!r} has {prefix}.bias, and heads have no bias here: remove it, which "
                        "shifts all rewards")
    return prefix
