"""Module calls of a decode step, without the code of Hugging Face around them.

On a CPU a step of few rows of a small model spends almost half of its time between the layers: Hugging Face reads
options from its configuration, finds that no mask is needed and builds outputs. All that is the same in every step.
"""
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrft.models.actor_modality import ActorModality
from lightrft.rollout.hf.cache_plan import LayerProbe

Forward = Callable[[Tensor, Tensor, Any], Tensor]  # input_ids [1, T], position_ids [1, T], view of the cache -> [T, V]
Inputs = ("input_ids", "position_ids", "view")  # of the pass; the outputs of its calls follow
_CONSTANTS = (type(None), bool, str)  # a number may depend on the number of tokens


class _Call(NamedTuple):
    """A call that was recorded, with its arguments."""
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Step(NamedTuple):
    """A call to repeat. Its arguments are *slots*: indices among the inputs of the pass, the constants, and the outputs
    of earlier calls. ``spent`` are those that no later call reads."""
    module: nn.Module
    args: list[int]
    kwargs: dict[str, int]
    spent: list[int]


class _Unknown(Exception):
    """An argument that is no output of an earlier call."""


def whole_pass(model: Any, modality: ActorModality) -> Forward:
    """Return the whole forward pass of ``model``."""

    def forward(input_ids: Tensor, position_ids: Tensor, view: Any) -> Tensor:
        return modality.logits(model, 0, input_ids=input_ids, position_ids=position_ids, attention_mask=None,
                               use_cache=False, kv_cache=view)

    return forward


class ModuleCalls:
    """Repeats the calls that a pass made to the layers of the decoder, its embedding, norm and rotary tables, and to
    the head; an argument is an input of the pass, the output of an earlier call, or a constant."""

    def __init__(self, steps: list[Step], constants: list[Any]) -> None:
        self.steps, self.constants = steps, constants

    def __call__(self, *inputs: Any) -> Tensor:
        """Return the logits [T, V]; inputs as in :data:`Forward`."""
        values = [*inputs, *self.constants]
        read = values.__getitem__
        for module, args, kwargs, spent in self.steps:
            values.append(module(*map(read, args), **dict(zip(kwargs, map(read, kwargs.values())))))
            for slot in spent:
                values[slot] = None
        return values[-1][0]


def _slot(value: Any, values: list[Any]) -> int:
    """Return the index of ``value`` among ``values``."""
    for index, known in enumerate(values):
        if known is value or _identity(known) is not None and _identity(known) == _identity(value):
            return index
    raise _Unknown


def _identity(value: Any) -> tuple[Any, ...] | None:
    """Return what two arguments have in common that are the same one; None: only an object itself is the same."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return (type(value), value) if type(value) in _CONSTANTS else None


def _recorded(body: nn.Module, head: nn.Module, forward: Forward, inputs: tuple[Tensor, Tensor, Any]) -> list[_Call]:
    """Run ``forward`` and return the calls of the parts of ``body`` and of ``head``, in order."""
    calls: list[_Call] = []
    children = list(body.children())
    layers = [layer for child in children if isinstance(child, nn.ModuleList) for layer in child]
    with ExitStack() as stack:
        for part in [*children, *layers, head]:
            hook = part.register_forward_hook(lambda *call: calls.append(_Call(*call)), with_kwargs=True)
            stack.callback(hook.remove)
        forward(*inputs)
    return calls


def _linked(calls: list[_Call], inputs: tuple[Tensor, Tensor, Any]) -> ModuleCalls:
    """Replace the arguments of recorded calls by their slots.

    Raises:
        _Unknown: the pass computes an argument between two calls.
    """
    constants = [*dict.fromkeys(value for call in calls for value in (*call.args, *call.kwargs.values())
                                if type(value) in _CONSTANTS)]  # yapf: disable
    values, steps = [*inputs, *constants], list[Step]()
    for module, args, kwargs, output in calls:
        slots = {name: _slot(value, values) for name, value in kwargs.items()}
        steps.append(Step(module, [_slot(value, values) for value in args], slots, []))
        values.append(output)
    last = {slot: step for step in steps for slot in (*step.args, *step.kwargs.values())}
    for slot, step in last.items():
        step.spent.append(slot)
    return ModuleCalls(steps, constants)


@torch.no_grad()
def find_decode_pass(model: Any, modality: ActorModality) -> Forward:
    """Return the pass of a decode step: calls of modules if they compute what the whole pass does, else that one.

    Calls are recorded with one token, and tried on others at other positions.
    """
    whole = whole_pass(model, modality)
    device = next(model.parameters()).device
    inputs = torch.ones(1, 1, dtype=torch.long, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        found = _recorded(modality.body(model), model.get_output_embeddings(), whole, (*inputs, probe := LayerProbe()))
        calls = _linked(found, (*inputs, probe))
    except _Unknown:
        return whole
    tokens, positions = torch.arange(3, device=device)[None], torch.tensor([[3, 0, 1]], device=device)
    seen, seen_whole = LayerProbe(), LayerProbe()
    same = torch.equal(calls(tokens, positions, seen), whole(tokens, positions, seen_whole))
    return calls if same and seen.shapes == seen_whole.shapes else whole
