"""The value function."""
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.actor_modality import ActorModality
from lightrft.models.packed_model import PackedModel
from lightrft.types import Experience


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
        values = score(hidden.to(score.weight.dtype))[:, 0].float()
        return torch.zeros(exp.num_tokens, device=values.device).index_put((index, ), values)

    def export_params(self, stream: Iterator[tuple[str, Tensor]], merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Override :meth:`PackedModel.export_params`; the head is called ``value_head_prefix``."""
        for name, tensor in super().export_params(stream, merge):
            yield (f"{self.value_head_prefix}.{name[6:]}" if name.startswith("score.") else name), tensor
