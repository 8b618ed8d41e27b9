"""Router choices of a mixture of experts in one forward pass, for the load-balancing loss."""
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.shared_prompts import ForwardRow
from lightrft.ops.segment import expand, segment_sum
from lightrft.types import Experience
from lightrft.utils.errors import UserError
from lightrft.utils.tensors import upload


@dataclass(frozen=True)
class Routing:
    """Routing of T tokens to E experts, averaged over the layers that have experts.

    A row of a forward pass has R tokens; a prompt that several sequences share is computed once, and counts for each.

    Attributes:
        probs: float32 [R, E], softmax of the router's logits, differentiable.
        chosen: float32 [R, E], the share of layers in which the expert is one of the top k; without a gradient.
        places: int64 [T], where each token of the sequences is in the row; None: the row is that of the sequences.
        counted: bool [T], tokens of real sequences; those of a dummy are not.
    """
    probs: Tensor
    chosen: Tensor
    places: Tensor | None
    counted: Tensor

    @classmethod
    def of(cls, logits: tuple[Tensor, ...], top_k: int, exp: Experience, places: Tensor | None) -> "Routing":
        """Read the ``logits`` ([R, E] of each layer) of a pass over ``exp``."""
        probs = [each.float().softmax(-1) for each in logits]
        chosen = [torch.zeros_like(p).scatter_(1, p.detach().topk(top_k, -1).indices, 1.0) for p in probs]
        host, device = exp.host, exp.token_ids.device
        real = expand(segment_sum(host.drawn, host.cu_seqlens) > 0, host.cu_seqlens, host.num_tokens)
        return cls(
            torch.stack(probs).mean(0),
            torch.stack(chosen).mean(0), None if places is None else upload(places, device), upload(real, device))

    def _per_token(self, values: Tensor) -> Tensor:
        return (values if self.places is None else values[self.places])[self.counted]

    def totals(self) -> Tensor:
        """float64 [E + 1]: how often each expert was chosen, summed over the counted tokens, and their number."""
        chosen = self._per_token(self.chosen).double()
        return torch.cat([chosen.sum(0), chosen.new_full((1, ), len(chosen))])

    def imbalance(self, totals: Tensor) -> Tensor:
        """``E * sum_e f_e * p_te`` of each counted token t; the mean over all tokens is the loss of Switch.

        Args:
            totals: :meth:`totals`, summed over the tokens that the choices f are measured on.
        """
        frequency = totals[:-1] / totals[-1].clamp_min(1)
        return self._per_token(self.probs @ frequency.to(self.probs)) * len(frequency)


def check_routers(model: nn.Module, option: str) -> None:
    """Raise a :class:`UserError`, naming ``option``, for a Hugging Face model without a load-balancing loss."""
    text: Any = model.config
    if not hasattr(text.get_text_config(), "router_aux_loss_coef"):
        raise UserError(f"{option}: {type(model).__name__} is no mixture of experts whose family is trained with a "
                        "load-balancing loss (such as Mixtral, Qwen2-MoE, Qwen3-MoE); drop it")


def read_routing(outputs: Any, model: nn.Module, exp: Experience, row: ForwardRow) -> Routing:
    """Return the routing of a pass of the body of ``model``, which was asked for ``output_router_logits``."""
    config: Any = model.config
    return Routing.of(outputs.router_logits, config.get_text_config().num_experts_per_tok, exp, row.places)
