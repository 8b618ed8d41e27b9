"""Tensors of the device that a decode step reads and writes; they stay where they are from one generation to the next.

A CUDA graph has their addresses. So the engine keeps them as long as generations have the same sizes and options.
"""
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.cache_plan import KVPlan
from lightrft.rollout.hf.kv_cache import Decode, KVCache
from lightrft.utils.tensors import upload

_LOGIT = 16  # bytes of a step per token of the vocabulary: float32 of the logit, the scaled one and its probability


@dataclass(frozen=True)
class Sizes:
    """Everything besides its sizes that a decode step depends on: the ``vocabulary``, the options of drawing, and what
    the numbers of the model follow from (addresses, frequencies)."""
    params: SamplingParams
    vocabulary: int
    model: tuple[int, ...] = ()


class Workspace:
    """State and results of the slots of a generation, on the device of ``cache``.

    ``state`` [4, slots] int64 holds the newest token, its position in the sequence and in the response, and whether the
    slot draws; ``free`` [4, 1] is that of a free slot. Results are written to ``tokens`` and ``logprobs`` [slots,
    max_new_tokens], where slots that draw nothing write what nobody reads. ``rows`` [slots] are their indices. With a
    repetition penalty ``seen`` [slots, V] has the tokens of the prompt and the response of each slot. ``noise`` [slots,
    max_new_tokens] float64 is None where nothing is drawn; ``stop`` [V] bool has the tokens that end.
    """

    def __init__(self, cache: KVCache, sizes: Sizes, one_kernel: bool = False) -> None:
        self.cache, self.sizes, self.decode = cache, sizes, Decode(cache, one_kernel)
        device, slots, params = cache.device, cache.plan.slots, sizes.params
        width = params.max_new_tokens
        self.free = torch.zeros(4, 1, dtype=torch.long, device=device)
        self.state = self.free.repeat(1, slots)
        self.rows = torch.arange(slots, device=device)
        self.stop = torch.zeros(sizes.vocabulary, dtype=torch.bool, device=device)
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(slots, sizes.vocabulary, dtype=torch.bool, device=device)
        self.noise: Tensor | None = None
        if max(params.temperature, params.first_temperature or 0.0) > 0.0:
            self.noise = torch.zeros(slots, width, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(slots, width, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(slots, width, dtype=torch.float32, device=device)

    def fits(self, plan: KVPlan, sizes: Sizes) -> bool:
        """Return True for a generation of these sizes; on a GPU its prompts may be shorter than the cache has room."""
        held = self.cache.plan
        if self.tokens.is_cuda and plan.prompt_len < held.prompt_len:
            plan = replace(plan, prompt_len=held.prompt_len)
        return plan == held and sizes == self.sizes

    def takes(self, params: SamplingParams) -> bool:
        """Return True for responses with these parameters."""
        draws = max(params.temperature, params.first_temperature or 0.0) > 0.0
        return (params.max_new_tokens <= self.tokens.shape[1] and (not draws or self.noise is not None)
                and (params.repetition_penalty == 1.0 or self.seen is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, the results, and the logits of a step."""
        cache, results = self.cache.prompts.nbytes + self.cache.rows.nbytes, self.tokens.nbytes + self.logprobs.nbytes
        return cache + results + len(self.state[0]) * len(self.stop) * _LOGIT

    def begin(self, stop: Tensor) -> None:
        """Free all slots for a generation that ends at the tokens ``stop`` [V] bool, of the host."""
        self.state.copy_(self.free.expand_as(self.state))
        self.stop.copy_(upload(stop, self.stop.device))


def covering(params: Iterable[SamplingParams]) -> SamplingParams:
    """Return the parameters whose workspace takes responses with any of ``params``; of equal ones, those."""
    first, *others = distinct = list(dict.fromkeys(params))
    if not others:
        return first
    return replace(first, max_new_tokens=max(one.max_new_tokens for one in distinct), first_temperature=None,
                   temperature=max(max(one.temperature, one.first_temperature or 0.0) for one in distinct),
                   repetition_penalty=max((one.repetition_penalty for one in distinct), key=lambda x: abs(x - 1.0)))
