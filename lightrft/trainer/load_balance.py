"""Load-balancing loss of a mixture of experts, exact over the batch of an optimizer step."""
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from lightrft.models.packed_model import PackedModel
from lightrft.models.routing import check_routers, Routing
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.trainer.metric_sums import MetricSums
from lightrft.types import Experience


class LoadBalance:
    """Adds ``coef * E * sum_e f_e * P_e`` to the loss of a mixture of E experts.

    Paper: Fedus et al. 2021 (Switch Transformer), https://arxiv.org/abs/2101.03961, equations 4 to 6, with the top k
    and the average over layers of ``load_balancing_loss_func`` of transformers: f_e counts how often a token has expert
    e among its top k, P_e is the mean probability that the routers give it. Both are means over all layers and over
    every token (prompts too) of the batch of the optimizer step, of all ranks and micro-batches: the value of that
    function for the padded batch with its attention mask. Packed rows have no padding to leave out.

    f has no gradient, so each micro-batch adds its share of P, multiplied by the f of the whole batch. With one
    micro-batch per rank f is known in its forward pass; with several, :meth:`measure` first runs a pass over all of
    them without gradients. So the loss does not depend on the micro-batches, unlike one that computes f per micro-batch
    (https://arxiv.org/abs/2501.11873 compares the two).

    Raises:
        UserError: the model is dense, or of a family without such a loss.
    """

    def __init__(self, coef: float, strategy: StrategyBase, prepared: Prepared) -> None:
        self.coef, self.strategy, self.model = coef, strategy, cast(PackedModel, prepared.model)
        check_routers(self.model.hf_model, f"--aux_loss_coef {coef:g}")
        self.model.routes = True
        self._totals: Tensor | None = None  # of the batch

    def measure(self, take: Callable[[list[int]], Experience], parts: list[list[int]]) -> None:
        """Count the choices of the routers on the micro-batches of the next optimizer step; a collective."""
        self._totals = None
        if len(parts) > 1:
            self.model.train()
            with torch.no_grad():
                self._totals = self._reduced([self._counted(take(part)) for part in parts])

    def _counted(self, exp: Experience) -> Tensor:
        self.model(exp.to(self.strategy.device))
        return self._routing().totals()

    def _reduced(self, totals: list[Tensor]) -> Tensor:
        return self.strategy.sum_data_ranks(torch.stack(totals).sum(0))

    def _routing(self) -> Routing:
        """Return the routing of the last forward pass, and clear it."""
        routing, self.model.routing = cast(Routing, self.model.routing), None
        return routing

    def share(self, sums: MetricSums, metric: str) -> Tensor:
        """Return the share of the micro-batch whose forward pass was the last one; its mean goes to ``sums``."""
        routing = self._routing()
        totals = self._reduced([routing.totals()]) if self._totals is None else self._totals
        values = routing.imbalance(totals)
        sums.add_tokens({metric: values}, torch.ones_like(values, dtype=torch.bool))
        return self.coef * (values.sum() + 0.0 * routing.probs.sum()) / totals[-1].clamp_min(1).float()
