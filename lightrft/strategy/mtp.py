"""Weights of multi-token prediction (MTP), which draft tokens for inference engines; training leaves them as they are.

Checkpoints hold them as ``mtp.*``, or as layers after the last one of the model. transformers drops them on load, so
exports take them from the folder that the model was loaded from.
"""
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from lightrft.utils.hub import files_of


def is_mtp(name: str, layers: int) -> bool:
    """Return True for the name of such a weight of a model with ``layers`` layers."""
    numbered = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return bool(re.search(r"(^|\.)mtp(\.|_)", name)) or bool(numbered and int(numbered[1]) >= layers)


def mtp_files(folder: Path, layers: int) -> dict[str, Path]:
    """Return the file of each such weight in ``folder``, by its name."""
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= {name: file for name in opened.keys() if is_mtp(name, layers)}
    return files


def dropped_weights(hf: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of this kind that ``hf`` was loaded without, by their names in the files; none for a model
    that generates nothing (a critic, a reward model), or whose folder is gone."""
    patterns = hf._keys_to_ignore_on_load_unexpected or ()
    folder = files_of(hf.config.name_or_path) if patterns and hf.generation_config is not None else None
    files = mtp_files(folder, hf.config.get_text_config().num_hidden_layers) if folder else {}
    for name, file in files.items():
        if any(re.search(pattern, name) for pattern in patterns):
            with safe_open(file, framework="pt") as opened:
                yield name, opened.get_tensor(name)
