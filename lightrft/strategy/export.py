"""HF folders: full weights streamed into safetensors files, so that no rank ever holds the whole model."""
import errno
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightrft.strategy.mtp import dropped_weights
from lightrft.utils.file_mode import give_modes, save_tensors

FILE_BYTES = 5 << 30
MODEL_CONFIG = "model_config.json"  # not config.json: Hugging Face would take an adapter for a whole model


@runtime_checkable
class Pretrained(Protocol):
    """An HF model, or a PEFT model around one (whose ``config`` is found at run time only: not part of the check)."""

    def save_pretrained(self, path: Any, **kwargs: Any) -> Any:
        """Write config and weights."""


@runtime_checkable
class WithAdapters(Pretrained, Protocol):
    """A PEFT model."""

    def get_base_model(self) -> Pretrained:
        """The HF model the adapters sit in."""


class SafetensorsWriter:
    """Writer of a stream of tensors in the form that HF reads: one file, or several and an index.

    torch's ``HuggingFaceStorageWriter`` writes the same bits of sharded weights, but it refuses tied weights, writes
    everything twice (shards, then the whole, on a file system that all ranks share), replaces an earlier export while
    it writes, and takes DTensors only: no merged LoRA weights, no ZeRO-3. So exports are written here.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self.folder, self.file_bytes = folder, file_bytes
        self.pending: dict[str, Tensor] = {}
        self.parts: list[list[str]] = []
        self.size = self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a CPU tensor; write a file when it would grow past ``file_bytes``."""
        nbytes = tensor.numel() * tensor.element_size()
        if self.pending and self.size + nbytes > self.file_bytes:
            self._flush()
        self.pending[name] = tensor
        self.size += nbytes
        self.total += nbytes

    def _part(self, index: int) -> Path:
        return self.folder / f"model-part-{index:05d}.safetensors.tmp"

    def _flush(self) -> None:
        part = self._part(len(self.parts))
        try:
            save_tensors(self.pending, part, {"format": "pt"})
        except SafetensorError as error:
            number = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
            raise OSError(number, str(error), str(part)) from error
        self.parts.append(list(self.pending))
        self.pending, self.size = {}, 0

    def close(self) -> None:
        """Write the last file, give all their final names and write the index. Files of an earlier export are
        removed."""
        self._flush()
        for old in [*self.folder.glob("model*.safetensors"), *self.folder.glob("model.safetensors.index.json")]:
            old.unlink()
        count, weight_map = len(self.parts), {}
        for index, names in enumerate(self.parts):
            final = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self.folder / final)
            weight_map.update({name: final for name in names})
        if count > 1:
            index_json = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2),
                                                                      encoding="utf-8")


def wrapped_hf(model: nn.Module) -> Pretrained:
    """The HF (or PEFT) model inside ``model``: itself, or its ``model`` attribute."""
    for candidate in (model, *(child for name, child in model.named_children() if name == "model")):
        if isinstance(candidate, Pretrained):
            return candidate
    raise ValueError(f"{type(model).__name__} wraps no Hugging Face model (an attribute `model` with save_pretrained)")


def write_model(model: nn.Module, stream: Iterator[tuple[str, Tensor]], path: Path | None,
                dtype: torch.dtype | None) -> None:
    """Write the full parameters of ``stream``, the buffers that checkpoints hold, weights that were dropped on load
    (:mod:`~lightrft.strategy.mtp`), the config and the generation config to the HF folder ``path``, in ``dtype``
    (default: at least float32), under the names of published checkpoints
    (:func:`~lightrft.models.weight_files.name_as_published`). A rank without a ``path`` takes part in gathering
    only."""
    from transformers.core_model_loading import revert_weight_conversion  # slow to import; the doctor needs none
    hf = wrapped_hf(model)
    if path is None:
        for _ in stream:
            pass
        return
    path.mkdir(parents=True, exist_ok=True)
    writer = SafetensorsWriter(path)
    base: Any = hf.get_base_model() if isinstance(hf, WithAdapters) else hf
    for name, tensor in chain(stream, saved_buffers(base)):
        as_type = dtype or torch.promote_types(tensor.dtype, torch.float32)
        kept = tensor.to("cpu", as_type if tensor.is_floating_point() else tensor.dtype)
        for published, part in revert_weight_conversion(base, {name: kept.clone() if kept is tensor else kept}).items():
            writer.add(published, part.contiguous())
    for name, tensor in dropped_weights(base):
        writer.add(name, tensor.to(dtype or torch.promote_types(tensor.dtype, torch.float32)))
    writer.close()
    _write_config(base, path, dtype)


def saved_buffers(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the constants of a model that its checkpoints hold next to its parameters (Gemma-4: scales of layers)."""
    for prefix, module in hf.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _write_config(hf: Any, path: Path, dtype: torch.dtype | None) -> None:
    before = hf.config.dtype
    hf.config.dtype = dtype or before or torch.float32
    hf.config.architectures = [type(hf).__name__.removeprefix("FSDP")]
    hf.config.save_pretrained(path)
    hf.config.dtype = before
    if hf.generation_config is not None:
        hf.generation_config.save_pretrained(path)


def adapter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that the adapter of ``model`` consists of: LoRA matrices, and the modules that its PEFT
    config saves whole (the head of a reward model). None of a model without adapters."""
    hf = wrapped_hf(model)
    if not isinstance(hf, WithAdapters):
        return []
    modules: list[str] = cast(Any, hf).active_peft_config.modules_to_save or []
    whole = tuple(f"{_prefix(model, hf)}base_model.model.{module}." for module in modules)
    return [name for name, _ in model.named_parameters() if "lora_" in name or name.startswith(whole)]


def _prefix(model: nn.Module, hf: Pretrained) -> str:
    """Prefix of the names of ``hf`` in ``model``."""
    return next((f"{name}." for name, child in model.named_children() if child is hf), "")


def write_adapter(model: nn.Module, stream: Iterator[tuple[str, Tensor]], path: Path | None) -> None:
    """Write the parameters of ``stream`` (:func:`adapter_names`) to ``path/adapter``, as PEFT reads them.

    The base model may lack the modules that are saved whole, and the format of steps of a process reward model; the
    config of the trained model, which describes both, is written beside the adapter as ``MODEL_CONFIG``. Nothing is
    gathered of a model without adapters.
    """
    hf = wrapped_hf(model)
    if not isinstance(hf, WithAdapters):
        return
    adapter = {name.removeprefix(_prefix(model, hf)): tensor.cpu().clone() for name, tensor in stream}
    if path is None:
        return
    folder = path / "adapter"
    hf.save_pretrained(folder, state_dict=adapter, save_embedding_layers=False)
    whole = {name: tensor.contiguous() for name, tensor in adapter.items() if "lora_" not in name}
    if whole:  # PEFT leaves them out: it has no wrapper around them here
        file = folder / "adapter_model.safetensors"
        save_tensors(load_file(file) | whole, file, {"format": "pt"})
    cast(Any, hf).get_base_model().config.to_json_file(folder / MODEL_CONFIG)
    give_modes(folder)
