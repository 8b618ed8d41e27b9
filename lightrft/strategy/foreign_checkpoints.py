"""Checkpoints that other programs wrote with DeepSpeed or ``torch.distributed.checkpoint``: names and full tensors."""
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightrft.strategy.deepspeed import NO_DEEPSPEED
from lightrft.utils.errors import UserError

WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


@dataclass(frozen=True)
class ForeignCheckpoint:
    """Tensors of a checkpoint, by the name that they have there.

    ``read`` loads those of some names, whole, on the CPU.
    """
    kind: str
    names: list[str]
    read: Callable[[list[str]], dict[str, Tensor]]


def open_checkpoint(folder: Path) -> ForeignCheckpoint | None:
    """Open a DeepSpeed or DCP folder; None if ``folder`` is neither.

    A DeepSpeed folder has ``latest``, or is one of the step folders in it.
    """
    if (folder / ".metadata").is_file():
        return _open_dcp(folder)
    if (folder / "latest").is_file():
        return _open_deepspeed(folder, (folder / "latest").read_text(encoding="utf-8").strip())
    if any(folder.glob("*mp_rank_*model_states.pt")):
        return _open_deepspeed(folder.parent, folder.name)
    return None


def _open_dcp(folder: Path) -> ForeignCheckpoint:
    reader = FileSystemReader(folder)
    saved = {
        name: one for name, one in reader.read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }

    def read(names: list[str]) -> dict[str, Tensor]:
        state = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names}
        dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        return state

    return ForeignCheckpoint("DCP", list(saved), read)


def _open_deepspeed(folder: Path, tag: str) -> ForeignCheckpoint:
    """Open a step of a DeepSpeed folder: the float32 weights of ZeRO's optimizers, else those of the model."""
    states = sorted((folder / tag).glob("*mp_rank_*model_states.pt"))
    if not states:
        raise UserError(f"{folder / tag} has no model_states.pt; give a folder that DeepSpeed's save_checkpoint wrote")
    if not any((folder / tag).glob("*_optim_states.pt")):
        state = torch.load(states[0], map_location="cpu", weights_only=False)["module"]
    else:
        if find_spec("deepspeed") is None:
            raise UserError(NO_DEEPSPEED)
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
    return ForeignCheckpoint("DeepSpeed", list(state), lambda names: {name: state[name] for name in names})


def match_names(names: Iterable[str], wanted: Mapping[str, object], tied: Iterable[str]) -> dict[str, str]:
    """Map each wanted name to the one that a program's own wrappers made of it.

    The wanted names have one prefix in common there, such as ``module.`` or ``model.``; names of wrappers in between
    are ignored. A tied tensor may be missing.

    Raises:
        UserError: a tensor is missing, there is one that the model does not have, or there are LoRA matrices.
    """
    plain = {WRAPPERS.sub("", name): name for name in names}
    if lora := next((name for name in plain if "lora_" in name), None):
        raise UserError(f"it holds LoRA matrices ({lora}): load them with the program that wrote them and save the "
                        "adapter; lightrft merge_lora merges it")
    anchor = max(wanted, key=len)
    prefixes = [name.removesuffix(anchor) for name in plain if name == anchor or name.endswith(f".{anchor}")]
    if not prefixes:
        raise UserError(f"it has no tensor that ends with {anchor}, the longest name of the model; it has "
                        f"{', '.join(list(plain)[:3])}. Give the model that it was trained from with --pretrain")
    prefix = min(prefixes, key=len)
    found = {name: plain[prefix + name] for name in wanted if prefix + name in plain}
    if missing := [name for name in wanted if name not in found and name not in tied]:
        raise UserError(f"it lacks {len(missing)} tensors of the model, the first is {prefix}{missing[0]}. Give the "
                        "model that it was trained from with --pretrain")
    return found
