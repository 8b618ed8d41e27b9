"""Base of the actor and the critic: one packed forward through the decoder body of a Hugging Face model; the critic."""
from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.models.actor_modality import ActorModality
from lightrft.models.lora import ADAPTER, apart_params, base_model, hf_name, merged_params
from lightrft.models.weight_files import WeightFiles
from lightrft.types import Experience
from lightrft.utils.errors import UserError


class PackedModel(nn.Module):
    """A Hugging Face (or PEFT) model, ``model``, that runs on packed sequences.

    The body and the head both run inside ``forward`` of this module, which therefore is the root for sharding.
    """

    def __init__(self, model: nn.Module, modality: ActorModality | None = None) -> None:
        super().__init__()
        self.model = model
        self.modality = modality or ActorModality()
        self.files: WeightFiles | None = None  # of the weights that are on the meta device

    @property
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model, without the PEFT wrapper."""
        return base_model(self.model)

    @property
    def config(self) -> object:
        """The Hugging Face config."""
        return self.hf_model.config

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """The modules that are sharded (and checkpointed) one by one."""
        names = set(self.hf_model._no_split_modules or ())
        return [module for module in self.hf_model.modules() if type(module).__name__.removeprefix("FSDP") in names]

    def action_hidden_states(self, exp: Experience) -> tuple[Tensor, Tensor]:
        """Return ``(index [N], hidden [N, H])``: tokens of ``exp.drawn`` with a predecessor, and its hidden state.

        N may be 0; the graph still reaches every parameter, with zero gradients, so that sharded ranks stay in step.
        """
        inputs = self.modality.inputs(exp)
        body: Any = self.modality.body(self.hf_model)
        hidden = body(**inputs).last_hidden_state[0]
        if inputs["packing"].calls < body.config.num_hidden_layers:
            raise UserError(
                f"{type(self.hf_model).__name__} called packed attention {inputs['packing'].calls} times in "
                f"{body.config.num_hidden_layers} layers: it mixes packed sequences and cannot be used")
        return exp.actions, hidden.index_select(0, exp.actions - 1)

    def read(self, name: str, first: int, rows: int) -> Tensor:
        """Return rows of the tensor ``name`` of this module from the files of the model."""
        if self.files is None:
            raise ValueError(f"{name}: the weights of this model are in no files")
        return self.files.read(hf_name(name.removeprefix("model.")), first, rows)

    @property
    def merges(self) -> bool:
        """True if :meth:`export_params` computes weights (LoRA) that this module does not hold."""
        return isinstance(self.model, PeftModel)

    @property
    def lora_rank(self) -> int:
        """Rank of the LoRA adapters; 0 without."""
        return cast(LoraConfig, self.model.peft_config[ADAPTER]).r if isinstance(self.model, PeftModel) else 0

    def export_params(self, stream: Iterator[tuple[str, Tensor]], merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Rename full tensors from the names in this module to Hugging Face names, with LoRA merged or apart."""
        own = ((name.removeprefix("model."), tensor) for name, tensor in stream)
        return merged_params(own, self.model) if merge else apart_params(own, self.model)


class Critic(PackedModel):
    """A decoder with one scalar per token: Hugging Face's sequence-classification model with one label.

    Args:
        model: the model; its head is ``score`` (Linear, no bias), as the public classes call it.
        value_head_prefix: the name of the head in exported checkpoints.
    """

    def __init__(self, model: nn.Module, value_head_prefix: str = "score",
                 modality: ActorModality | None = None) -> None:
        super().__init__(model, modality)
        self.value_head_prefix = value_head_prefix

    def forward(self, exp: Experience) -> Tensor:
        """Values [T], float32: at t the value of the state in which token t was chosen (the hidden state at t - 1).

        0 outside ``exp.drawn`` and at the first token of every sequence. Differentiable, also when nothing is kept.
        """
        index, hidden = self.action_hidden_states(exp)
        score: Any = self.hf_model.score
        values = score(hidden)[:, 0].float()
        return torch.zeros(exp.num_tokens, device=values.device).index_put((index, ), values)

    def export_params(self, stream: Iterator[tuple[str, Tensor]], merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Override :meth:`PackedModel.export_params`; the head is called ``value_head_prefix``."""
        for name, tensor in super().export_params(stream, merge):
            yield (f"{self.value_head_prefix}.{name[6:]}" if name.startswith("score.") else name), tensor
