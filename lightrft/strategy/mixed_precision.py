"""Computing in bfloat16 with float32 master weights, for unsharded models and for ZeRO-3.

The parameters of a model stay float32 under their names; the optimizer, checkpoints and exports read them. Its
modules compute with another tensor, found under the same attribute: an entry in the ``__dict__`` of a
module hides the parameter of that name. So the forward pass, a recomputed one and generation read bfloat16, and
autograd leads from there to the gradient of the parameter: one bfloat16 gradient per backward pass, added up in
float32, as FSDP2's ``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)`` does.
"""
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.utils.tensors import keeps_float32

COMPUTE = torch.bfloat16
ONE_TYPE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm)  # of inputs and weights


class _Rounded(torch.autograd.Function):
    """``copy``, which holds the rounded ``master``; the gradient goes to the master, in its type."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:
        return copy.detach()  # shares storage and version: a copy that is written between the passes is noticed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


Slot = tuple[nn.Module, str, nn.Parameter]  # module, attribute, value


def _own_slots(module: nn.Module) -> list[Slot]:
    """The float32 parameters of ``module`` itself that passes read rounded."""
    found = {} if keeps_float32(module) else module._parameters
    return [(module, name, param) for name, param in found.items()
            if param is not None and param.dtype == torch.float32]


def _slots(model: nn.Module) -> Iterator[Slot]:
    """The float32 parameters of ``model``; a tied one comes several times."""
    for module in model.modules():
        yield from _own_slots(module)


def compute_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that passes of ``model`` read, under the names of its parameters; tied ones come several times."""
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                yield f"{prefix}.{name}".lstrip("."), getattr(module, name)


def round_frozen(model: nn.Module) -> None:
    """Convert weights that are not trained to bfloat16: without updates they need no more precision than the passes."""
    for _, _, param in _slots(model):
        if not param.requires_grad:
            param.data = param.data.to(COMPUTE)


def round_in_passes(model: nn.Module) -> None:
    """Let every module compute in bfloat16 with weights that are whole only during its own pass, as with ZeRO-3.

    They are rounded in each pass, and again where it is recomputed. What a pass reads of another module stays float32:
    towers ask so for the type of their first layer, and cast pictures to it; towers of sounds add the weights of their
    positions. So modules that need :data:`ONE_TYPE` cast what they get. A layer that calls its parts several times
    rounds their weights once, for all of its pass.
    """
    layers = {part: layer for layer in model.modules() if getattr(layer, "calls_by_rank", False)
              for part in layer.modules()}  # yapf: disable
    for module in model.modules():
        if module._parameters and not keeps_float32(module):
            reader = layers.get(module, module)
            reader.register_forward_pre_hook(partial(_show, module))
            reader.register_forward_hook(partial(_hide, module), always_call=True)
            if isinstance(module, ONE_TYPE):
                module.register_forward_pre_hook(_cast)


def _show(owner: nn.Module, _module: nn.Module, _args: Any) -> None:
    vars(owner).update({name: param.to(COMPUTE) for _, name, param in _own_slots(owner)})


def _cast(_module: nn.Module, args: Any) -> Any:
    return tuple(map(_rounded, args))


def _rounded(value: Any) -> Any:
    return value.to(COMPUTE) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _hide(owner: nn.Module, _module: nn.Module, _args: Any, _output: Any) -> None:
    for name in owner._parameters:
        vars(owner).pop(name, None)


class ComputeCopy:
    """One bfloat16 copy of the float32 weights of ``model``, with which it computes from now on.

    The copy is written in place by :meth:`refresh` alone, so threads that compute meanwhile share nothing else.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.make()

    def make(self) -> None:
        """Make the copy, where the weights are now."""
        self.free()
        shown: dict[nn.Parameter, Tensor] = {}
        for module, name, param in _slots(self.model):
            if param not in shown:
                copy = param.detach().to(COMPUTE)
                self.masters.append(param)
                self.copies.append(copy)
                with torch.enable_grad():
                    shown[param] = _Rounded.apply(param, copy)
            vars(module)[name] = shown[param]

    def free(self) -> None:
        """Drop the copy; until :meth:`make`, the model must not compute."""
        for module, name, _ in _slots(self.model):
            vars(module).pop(name, None)
        self.masters, self.copies = [], []

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights again, after they have changed."""
        torch._foreach_copy_(self.copies, self.masters)

    @torch.no_grad()
    def stale(self) -> list[str]:
        """Names of the weights whose copy is not what they are when rounded; one answer from the device."""
        if not self.copies:
            return []
        wrong = torch.stack([(copy != param.to(COMPUTE)).any() for copy, param in zip(self.copies, self.masters)])
        names: dict[Tensor, str] = {param: name for name, param in self.model.named_parameters()}
        return [names[self.masters[index]] for index in wrong.nonzero()[:, 0].tolist()]
