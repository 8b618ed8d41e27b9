"""LoRA adapters in vLLM, beside base weights that are sent once: every update fills them in place."""
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

MARK = ".lora_"  # in the name of every adapter's matrix, and of no other weight
_NUMBER = 1


def adapter_arguments(rank: int) -> dict[str, Any]:
    """What vLLM is started with, to have room for one adapter of ``rank`` at each layer."""
    from vllm.config.lora import MaxLoRARanks
    room = min((size for size in get_args(MaxLoRARanks) if size >= rank), default=0)
    if not room:
        raise UserError(f"--lora_rank {rank}: vLLM takes adapters of rank {max(get_args(MaxLoRARanks))} at most; lower "
                        "it, or use --lora_sync merged")  # yapf: disable
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """``model`` without the layers that vLLM puts around those with adapters, under whose names nothing is loaded."""
    from vllm.lora.layers import BaseLayerWithLoRA
    around = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)]
    for name, layer in around:
        model.set_submodule(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in around:
            model.set_submodule(name, layer)


class Adapters:
    """The one adapter of a vLLM engine.

    Attributes:
        request: what makes a request of ``native`` use it.
    """

    def __init__(self, native: "LLMEngine", rank: int) -> None:
        from vllm.lora.request import LoRARequest
        self.request = LoRARequest("policy", _NUMBER, "in this process")
        loader = native.model_executor.driver_worker.worker.model_runner.lora_manager
        loader.add_dummy_lora(self.request, rank)  # zeros; now that it has this one, it looks for no file
        manager = loader._adapter_manager
        manager.activate_adapter(_NUMBER)
        self.slot = manager.lora_index_to_id.index(_NUMBER)
        self.layers = {
            part: (layer, i) for name, layer in manager.modules.items()
            for i, part in enumerate(manager.packed_modules.get(name, [name]))
        }

    def take(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """``stream`` without the matrices of adapters, which are filled on the way."""
        for name, tensor in stream:
            if MARK in name:
                self._fill(name, tensor)
            else:
                yield name, tensor

    @torch.no_grad()
    def _fill(self, name: str, tensor: Tensor) -> None:
        at, _, which = name.partition(MARK)
        if at not in self.layers:
            raise UserError(f"vLLM has no room for an adapter at {at}: use --lora_sync merged")
        layer, i = self.layers[at]
        stacked, cut = ((layer.lora_a_stacked, layer.slice_lora_a) if which[0] == "A" else
                        (layer.lora_b_stacked, layer.slice_lora_b))
        if layer.tp_size > 1:
            tensor = cut([tensor if j == i else None
                          for j in range(len(stacked))])[i] if len(stacked) > 1 else cut(tensor)
        stacked[i][self.slot, 0, :tensor.shape[0], :tensor.shape[1]].copy_(tensor)
