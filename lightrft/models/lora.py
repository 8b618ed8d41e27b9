"""LoRA (Hu et al. 2021, arXiv:2106.09685) by peft: adapters on, off, and merged into the weights of the base model."""
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.utils.errors import UserError

ADAPTER = "default"
_WRAPPER = "base_model.model."


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a PEFT model; any other model is returned as it is."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return base


def add_lora(hf: PreTrainedModel, rank: int, alpha: int, dropout: float, target_modules: list[str]) -> PeftModel:
    """Freeze ``hf`` and put adapters on ``target_modules`` ("all-linear": every linear layer but the head).

    Raises:
        ValueError: the targets match nothing, or include the embedding or the head (read past the adapters).
    """
    targets: Any = "all-linear" if target_modules == ["all-linear"] else list(target_modules)
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):  # the same adapters on every rank, whatever its generator has drawn before
        torch.manual_seed(0)
        peft = get_peft_model(hf, config)
    for module in peft.get_base_model().modules():
        if isinstance(module, LoraLayer):  # inputs have the type that the layer computes in; its parameters may not
            module.cast_input_dtype_enabled = False
    ends = {id(hf.get_input_embeddings()), id(hf.get_output_embeddings())}
    wrong = [
        name for name, module in peft.get_base_model().named_modules()
        if isinstance(module, LoraLayer) and id(module) in ends
    ]
    if wrong:
        raise UserError(
            f"--target_modules {' '.join(target_modules)} puts LoRA on {wrong[0]}; only linear layers of the decoder "
            "body can have adapters")
    return peft


def adapter_disabled(model: nn.Module) -> AbstractContextManager[Any]:
    """Context in which ``model`` computes what its frozen base model computes."""
    if not isinstance(model, PeftModel):
        raise UserError("only a model with LoRA adapters can switch them off; load a reference model instead")
    return model.disable_adapter()


def hf_name(name: str) -> str:
    """The name a parameter of a PEFT model has in the Hugging Face model (unchanged where there is no PEFT)."""
    return name.removeprefix(_WRAPPER).replace(".base_layer.", ".")


def merged_params(stream: Iterator[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Map names and full tensors of ``model``, in any order, to those of its HF model, with W + scale * B A for W.

    Only layers whose three tensors have not all arrived yet are held. Without PEFT the stream passes through.

    Raises:
        ValueError: the stream ended before all parts of a layer had come.
    """
    if not isinstance(model, PeftModel):
        yield from stream
        return
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stream:
        layer, _, part = _split(name)
        if layer not in layers or part not in ("base_layer.weight", f"lora_A.{ADAPTER}.weight",
                                               f"lora_B.{ADAPTER}.weight"):
            yield hf_name(name), tensor
            continue
        held = parts.setdefault(layer, {})
        held[part[:6]] = tensor
        if len(held) == 3:
            del parts[layer]
            yield hf_name(f"{layer}.weight"), _merge(layers[layer], held["base_l"], held["lora_A"], held["lora_B"])
    if parts:
        raise UserError(
            f"LoRA cannot be merged: the stream holds only {sorted(next(iter(parts.values())))} of {next(iter(parts))}")


def apart_params(stream: Iterator[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Map names and tensors of ``model`` to its base weights under Hugging Face names and to the matrices of its
    adapters, ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, the second one times the scale."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, tensor in stream:
        layer, mark, _ = _split(name)
        if mark == ".lora_B.":
            tensor = tensor * layers[layer].scaling[ADAPTER]
        yield hf_name(name.replace(f".{ADAPTER}.", ".")), tensor


def _split(name: str) -> tuple[str, str, str]:
    for mark in (".base_layer.", ".lora_A.", ".lora_B."):
        if mark in name:
            layer, _, rest = name.partition(mark)
            return layer, mark, mark[1:] + rest
    return "", "", name


def _merge(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Merge to [out, in] (or its transpose for layers that store it so), in float32: frozen weights may have less."""
    delta = (b.float() @ a.float()) * layer.scaling[ADAPTER]
    return weight.float() + (delta.t() if layer.fan_in_fan_out else delta)
