"""Canaries: a few real prompts that the engine continues and the trainer scores; both must see the same model.

They cover what fingerprints of weights cannot: caches that outlive an update, layouts and quantization, and the
engine's arithmetic itself.
"""
import math
from collections.abc import Sequence

import torch

from lightrft.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from lightrft.strategy.strategy_base import Prepared, StrategyBase
from lightrft.types import Experience, Prompt

PROMPTS, NEW_TOKENS = 4, 4
# nats, mean |engine - trainer| over the tokens, without and with bfloat16. The first gap, with the weights that were
# loaded, must stay below AT_START; it sets the band of the later ones: SLACK times itself, at least LEAST.
AT_START, LEAST, SLACK = (1e-3, 0.2), (1e-4, 0.05), 10.0


class Canary:
    """Measures the gap between engine and trainer, and knows how wide it may be.

    Args:
        prompts: the first few are used, the same on every rank; ``new_tokens``: most of each response.
        bf16: the trainer computes in bfloat16.

    Attributes:
        band: largest gap that is no fault; None before the first measurement.
    """

    def __init__(self, strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, prompts: Sequence[Prompt],
                 new_tokens: int, bf16: bool) -> None:
        self.strategy, self.prepared, self.engine, self.bf16 = strategy, prepared, engine, bf16
        chosen = [prompts[i] for i in range(min(PROMPTS, len(prompts)))]
        self.requests = [Request(prompt.token_ids, [i], prompt.mm_inputs) for i, prompt in enumerate(chosen)]
        self.params = SamplingParams(min(NEW_TOKENS, new_tokens))
        self.band: float | None = None

    def measure(self) -> list[float]:
        """The gap on every rank; a collective. The first call sets the band, if its own gap allows."""
        mine = torch.zeros(self.strategy.world_size, dtype=torch.float64)
        mine[self.strategy.rank] = self._gap()
        gaps = self.strategy.all_reduce(mine).tolist()
        if self.band is None and max(gaps) <= AT_START[self.bf16]:
            self.band = max(LEAST[self.bf16], SLACK * max(gaps))
        return gaps

    @property
    def limit(self) -> float:
        """The band, or what the first gap must stay below."""
        return AT_START[self.bf16] if self.band is None else self.band

    @torch.no_grad()
    def _gap(self) -> float:
        """This rank's, in nats; infinite where a log-prob is not a number. The model's mode is put back."""
        completions = [group[0] for group in self.engine.generate(self.requests, self.params)]
        exp, model = self._packed(completions).to(self.strategy.device), self.prepared.model
        training = model.training
        model.eval()
        scored = model(exp)[0][exp.loss_mask].double().cpu()
        model.train(training)
        self.strategy.free_full(model)
        told = torch.tensor([value for one in completions for value in one.logprobs], dtype=torch.float64)
        gap = (scored - told).abs().mean().item()
        return gap if math.isfinite(gap) else math.inf

    def _packed(self, completions: list[Completion]) -> Experience:
        """Prompts with their responses; the mask keeps the responses."""
        parts = [(request.token_ids, one.token_ids) for request, one in zip(self.requests, completions)]
        lens = torch.tensor([0] + [len(prompt) + len(response) for prompt, response in parts])
        return Experience(
            token_ids=torch.tensor([token for prompt, response in parts
                                    for token in [*prompt, *response]]), cu_seqlens=lens.cumsum(0).to(torch.int32),
            loss_mask=torch.tensor([kept for p, r in parts for kept in [False] * len(p) + [True] * len(r)]),
            mm_inputs=[request.mm_inputs for request in self.requests])
