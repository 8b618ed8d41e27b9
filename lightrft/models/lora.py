"""LoRA (Hu et al. 2021, arXiv:2106.09685) by peft: adapters on, off, and merged into the weights of the base model.

peft is imported where adapters are made: its import takes more than a second where it finds bitsandbytes.
"""
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightrft.models.actor_modality import ActorModality
from lightrft.models.stateful import unadapted
from lightrft.utils.errors import did_you_mean, UserError

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "default"
_ADAPTED = (nn.Linear, Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # modules that peft has adapters for
_WRAPPER = "base_model.model."


def has_adapters(model: nn.Module) -> "TypeGuard[PeftModel]":
    """Return True for a PEFT model; without an import of peft there is none."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a PEFT model; any other model is returned as it is."""
    base: Any = model.get_base_model() if has_adapters(model) else model
    return base


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of ``model`` that have adapters, by name; without an import of peft there are none."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


class Targets(NamedTuple):
    """Names of the targets of adapters: modules, and matrices outside linear layers (Gemma-3's projector)."""
    modules: list[str]
    matrices: list[str]


def find_targets(hf: PreTrainedModel, words: list[str], modality: ActorModality) -> Targets:
    """Find the targets that ``words`` name in ``hf``: the linear layers of a part of the model
    (:meth:`ActorModality.parts`; "all-linear": of the decoder) that can have an adapter, the matrices of a part without
    any, or the modules whose names end with a word.

    Raises:
        UserError: a word matches nothing, or a module that cannot have an adapter.
    """
    head, names = hf.get_output_embeddings(), [name for name, _ in hf.named_modules()]
    linear = [name for name in names if isinstance(hf.get_submodule(name), (nn.Linear, Conv1D))]
    refused = unadapted(hf) | _taken_for_experts(hf, linear) | _shared(hf, linear)
    own = [name for name in linear if hf.get_submodule(name) is not head and name not in refused]
    parts = modality.parts(hf, own)
    weights = dict(hf.named_parameters())
    matrices = modality.parts(hf, [name for name, weight in weights.items() if weight.ndim == 2])
    found = Targets([], [])
    for word in words:
        named = parts.get("language" if word == "all-linear" else word) or [
            name for name in names if f".{name}".endswith(f".{word}")]  # yapf: disable
        bare = [] if named else matrices.get(word, [])
        if not named and not bare:
            ends = [name.rpartition(".")[2] for name in own]
            raise UserError(f"--target_modules {word} matches no module{did_you_mean(word, ends)}; linear layers of "
                            f"the parts of this model: {', '.join(parts)}; or the end of module names, e.g. {ends[-1]}")
        for name in named:
            if not isinstance(module := hf.get_submodule(name), _ADAPTED) or name in refused:
                reason = f" ({refused[name]})" if name in refused else ""
                raise UserError(f"--target_modules {word} matches {name}, a {type(module).__name__}, which cannot have "
                                f"an adapter{reason}; name linear layers, e.g. {own[-1].rpartition('.')[2]}, or "
                                "all-linear")
        found.modules.extend(named)
        found.matrices.extend(bare)
    return found


def _shared(hf: PreTrainedModel, linear: list[str]) -> dict[str, str]:
    """Find the ``linear`` layers whose weight is that of another one (Zamba 2), so that no single weight could have
    both adapters merged. By name, with the reason."""
    weights = {name: id(hf.get_submodule(name).weight) for name in linear}
    counts = Counter(weights.values())
    return {name: "layers share its weight" for name, weight in weights.items() if counts[weight] > 1}


def _taken_for_experts(hf: PreTrainedModel, linear: list[str]) -> dict[str, str]:
    """Find the ``linear`` layers that peft takes for experts of transformers 4: of a shared expert, or of an MLP beside
    mixtures. It would put the adapters on the experts, here and where the exported adapter is read. By name, with the
    reason."""
    from peft import LoraConfig
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a release that takes all names as they are
        return {}
    ends = {name.rpartition(".")[2] for name in linear}
    for end in sorted(ends):
        config = LoraConfig(target_modules=[end])
        try:
            convert_peft_config_for_transformers(config, hf, None)
        except ValueError:  # it would have to be adapted together with another one
            continue
        ends -= {end} & set(config.target_modules or ())
    return {name: "peft takes it for experts" for name in linear if name.rpartition(".")[2] in ends}


def add_lora(hf: PreTrainedModel, rank: int, alpha: int, dropout: float, target_modules: list[str],
             modality: ActorModality | None = None) -> "PeftModel":
    """Freeze ``hf`` and put adapters on the ``target_modules`` (:func:`find_targets`).

    Raises:
        ValueError: the targets match nothing, include the embedding or the head (read past the adapters), or a matrix
            that would need dropout on its input.
    """
    from peft import LoraConfig, get_peft_model
    modules, matrices = find_targets(hf, target_modules, modality or ActorModality())
    if matrices and dropout:
        raise UserError(f"--lora_dropout {dropout:g}: {matrices[0]} is a bare matrix, whose adapter is added to the "
                        f"matrix and has no input to drop; set 0, or leave {' '.join(target_modules)} without it")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules,
                        target_parameters=matrices or None, task_type="CAUSAL_LM" if hf.can_generate() else None)
    # The same adapters on every rank, whatever its generators have drawn before; a seed is that of GPUs too.
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(0)
        peft = get_peft_model(hf, config)
    layers = _layers(peft.get_base_model())
    for module in layers.values():  # inputs have the type that the layer computes in; its parameters may not
        module.cast_input_dtype_enabled = False
    ends = {id(hf.get_input_embeddings()), id(hf.get_output_embeddings())}
    wrong = [name for name, module in layers.items() if id(module) in ends]
    if wrong:
        raise UserError(
            f"--target_modules {' '.join(target_modules)} puts LoRA on {wrong[0]}; only linear layers before the "
            "head can have adapters")
    return peft


def adapter_disabled(model: nn.Module) -> AbstractContextManager[Any]:
    """Context in which ``model`` computes what its frozen base model computes."""
    if not has_adapters(model):
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
    if not has_adapters(model):
        yield from stream
        return
    layers = _layers(model)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stream:
        layer, _, part = _split(name)
        if layer not in layers or part not in (f"base_layer.{_matrix(layers[layer])}", f"lora_A.{ADAPTER}.weight",
                                               f"lora_B.{ADAPTER}.weight"):
            yield hf_name(name), tensor
            continue
        held = parts.setdefault(layer, {})
        held[part[:6]] = tensor
        if len(held) == 3:
            del parts[layer]
            own = hf_name(f"{layer}.{_matrix(layers[layer])}")
            yield own, _merge(layers[layer], held["base_l"], held["lora_A"], held["lora_B"])
    if parts:
        raise UserError(
            f"LoRA cannot be merged: the stream holds only {sorted(next(iter(parts.values())))} of {next(iter(parts))}")


def merged_weight(layer: Any) -> Tensor:
    """Return the weight of a linear layer, and with an adapter a new one to which that is added, of the same dtype."""
    if "peft" not in sys.modules or not isinstance(layer, sys.modules["peft"].tuners.lora.LoraLayer):
        return layer.weight  # type: ignore[no-any-return]
    base = layer.get_base_layer()
    a, b = (matrices[ADAPTER].weight for matrices in (layer.lora_A, layer.lora_B))
    return _merge(layer, base.weight, a, b).to(base.weight.dtype)


def trained_names(model: nn.Module, merge: bool) -> set[str]:
    """Return the names of the parameters of ``model`` from which the weights that training changes are made: those that
    are trained; with ``merge`` also the weights that a trained adapter is added to, without their biases."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapted = {_split(name)[0] for name in trained} - {""} if merge else set()
    layers = _layers(model)
    return trained | {
        name for name, _ in model.named_parameters()
        if (at := _split(name)[0]) in adapted and (".lora_" in name or name.endswith(f".{_matrix(layers[at])}"))
    }


def apart_params(stream: Iterator[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Map names and tensors of ``model`` to its base weights under Hugging Face names and to the matrices of its
    adapters, ``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight``, the second one times the scale."""
    layers = _layers(model)
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


def _matrix(layer: Any) -> str:
    """Name of the matrix that the adapter of ``layer`` is added to."""
    return getattr(layer, "parameter_name", "weight")


def _merge(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Merge to [out, in] (or its transpose for layers that store it so), in float32: frozen weights may have less."""
    delta = (b.float() @ a.float()) * layer.scaling[ADAPTER]
    return weight.float() + (delta.t() if layer.fan_in_fan_out else delta)
