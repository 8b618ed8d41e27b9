"""Checkpoints that other programs wrote with DeepSpeed or ``torch.distributed.checkpoint``: names and full tensors."""
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightrft.strategy.deepspeed import NO_DEEPSPEED
from lightrft.strategy.plain_pickle import load_plain, loads_are_plain, PlainReader
from lightrft.utils.errors import UserError

WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
# what programs store next to a model: its optimizer, schedules, generators, positions in the data
OTHERS = re.compile(
    r"^([^.]*optim[^.]*|[^.]*scheduler|scaler|rng[^.]*|[^.]*dataloader|train(er)?_state)(\.|$)|\.optim[^.]*\."
    r"|(^|\.)(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|step)$")
LEGACY_BUFFERS = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids)$")  # older versions of transformers stored them

UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, UnpicklingError,
              CheckpointException)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Context in which a damaged file of ``folder`` is a :class:`UserError`."""
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{folder} cannot be read: {cause[-1]}. A file of it is missing or damaged: copy the folder "
                        "again") from error


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

    Raises:
        UserError: it cannot be read, or holds DCP folders.
    """
    with reading(folder):
        return _opened(folder)


def _opened(folder: Path) -> ForeignCheckpoint | None:
    if (folder / ".metadata").is_file():
        return _open_dcp(folder)
    if (folder / "latest").is_file():
        return _open_deepspeed(folder, (folder / "latest").read_text(encoding="utf-8").strip())
    if any(folder.glob("*mp_rank_*model_states.pt")):
        return _open_deepspeed(folder.parent, folder.name)
    if shards := sorted(folder.rglob("model_world_size_*_rank_*.pt")):
        raise UserError(
            f"{shards[0]} is a shard of verl, whose pickled objects are not read. Merge the shards with verl, "
            "where they were written: python -m verl.model_merger merge --backend fsdp --local_dir "
            f"{shards[0].parent} --target_dir OUT, which writes a Hugging Face model")
    parts = sorted(file.parent.name for file in folder.glob("*/.metadata"))
    if parts not in ([], ["tensors"]):  # a checkpoint of lightrft
        raise UserError(f"{folder} holds the DCP folders {', '.join(parts)}: give the one with the model")
    return None


def _open_dcp(folder: Path) -> ForeignCheckpoint:
    reader = PlainReader(folder)
    saved = {
        name: one for name, one in reader.read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }

    def read(names: list[str]) -> dict[str, Tensor]:
        state = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names}
        with reading(folder):
            dcp.load(state, storage_reader=PlainReader(folder), no_dist=True)
        return state

    return ForeignCheckpoint("DCP", list(saved), read)


def _open_deepspeed(folder: Path, tag: str) -> ForeignCheckpoint:
    """Open a step of a DeepSpeed folder: the float32 weights of ZeRO's optimizers, else those of the model."""
    states = sorted((folder / tag).glob("*mp_rank_*model_states.pt"))
    if not states:
        raise UserError(f"{folder / tag} has no model_states.pt; give a folder that DeepSpeed's save_checkpoint wrote")
    if not any((folder / tag).glob("*_optim_states.pt")):
        state = load_plain(states[0])["module"]
    else:
        if find_spec("deepspeed") is None:
            raise UserError(NO_DEEPSPEED)
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        with loads_are_plain():
            state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
    state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return ForeignCheckpoint("DeepSpeed", list(state), lambda names: {name: state[name] for name in names})


def match_names(names: Iterable[str], wanted: Mapping[str, object], tied: Iterable[str],
                unread: Iterable[str] = ()) -> dict[str, str]:
    """Map each wanted name to the one that a program's own wrappers made of it.

    The wanted names have one prefix in common there, such as ``module.`` or ``model.``; names of wrappers in between
    are ignored. A tied tensor may be missing. Names of an optimizer, or outside the prefix, are left alone.

    Args:
        unread: patterns (regular expressions) of names that a checkpoint may have and the model computes itself.

    Raises:
        UserError: a tensor is missing, there is one that the model does not have, there are LoRA matrices, or several
            models.
    """
    plain = {WRAPPERS.sub("", name): name for name in names}
    if lora := next((name for name in plain if "lora_" in name), None):
        raise UserError(f"it holds LoRA matrices ({lora}): load them with the program that wrote them and save the "
                        "adapter; lightrft merge_lora merges it")
    prefix = _prefix(plain, max(wanted, key=len))
    found = {name: plain[prefix + name] for name in wanted if prefix + name in plain}
    if missing := [name for name in wanted if name not in found and name not in tied]:
        raise UserError(f"it lacks {len(missing)} tensors of the model, the first is {prefix}{missing[0]}. Give the "
                        "model that it was trained from with --pretrain")
    known = [OTHERS, LEGACY_BUFFERS, *map(re.compile, unread)]
    own = [name.removeprefix(prefix) for name in plain if name.startswith(prefix)]
    if excess := [name for name in own if name not in wanted and not any(each.search(name) for each in known)]:
        raise UserError(f"it has {len(excess)} tensors that the model does not have, the first is {prefix}{excess[0]}. "
                        "Give the model that it was trained from with --pretrain: of as many layers, and with the "
                        "same head (score: a sequence classifier)")
    return found


def _prefix(plain: Iterable[str], anchor: str) -> str:
    """Find what stands before ``anchor``, a name of the model, in the names of a checkpoint.

    Raises:
        UserError: no name ends with ``anchor``, or several do.
    """
    ends = sorted(name for name in plain if name == anchor or name.endswith(f".{anchor}"))
    prefixes = [name.removesuffix(anchor) for name in ends if not OTHERS.search(name)]
    if not prefixes:
        raise UserError(f"it has no tensor that ends with {anchor}, the longest name of the model; it has "
                        f"{', '.join(list(plain)[:3])}. Give the model that it was trained from with --pretrain")
    if len(prefixes) > 1:
        listed = ", ".join(prefix or "no prefix" for prefix in prefixes)
        raise UserError(f"it holds {len(prefixes)} models, under {listed}: load it with the program that wrote it, and "
                        "save only the one that you need")
    return prefixes[0]
