"""Drawing tokens: reproducible noise, restriction of a distribution, inverse-CDF sampling. Pure functions."""
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightrft.rollout.engine import SamplingParams

_ONE_LEVEL = 4096  # vocabularies up to this size take one cumulative sum


def uniforms(seeds: list[int], count: int) -> np.ndarray:
    """[B, count] float64 in [0, 1): row b depends on ``seeds[b]`` alone and column t is the draw of response token t.

    Philox is counter-based and keyed by the seed (Salmon et al. 2011), so a longer row starts with the shorter one.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return np.stack(rows) if rows else np.empty((0, count))


def _mixed(x: Tensor) -> Tensor:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    variant 13), on int64 that overflow."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def uniforms_at(seeds: Tensor, positions: Tensor) -> Tensor:
    """[n] float64 in [0, 1): the draws at ``positions`` [n] in separate streams, one for each of ``seeds`` [n]."""
    state = _mixed(seeds) + (positions.long() + 1) * -0x61C8864680B583EB
    return (_mixed(state) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [n, V] with those of ``seen`` [n, V] bool divided by ``penalty`` where positive, else multiplied (Keskar
    et al. 2019, arXiv:1909.05858)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def restrict(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits [n, V] with -inf outside top-k, then top-p, then min-p (the order of Hugging Face).

    Tokens that tie with the k-th stay in. At least the most likely token stays.
    """
    vocabulary = logits.shape[-1]
    if 0 < params.top_k < vocabulary:
        kth = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        probs, order = logits.softmax(-1).sort(descending=True, stable=True)
        outside = probs.cumsum(-1) - probs >= params.top_p
        outside[:, 0] = False
        logits = logits.masked_fill(torch.empty_like(outside).scatter_(1, order, outside), -torch.inf)
    if params.min_p > 0.0:
        peak = logits.max(-1, keepdim=True).values
        logits = logits.masked_fill(logits < peak + float(np.log(params.min_p)), -torch.inf)
    return logits


def _search(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First index [n, 1] whose cumulative weight exceeds ``u * total``; that target [n, 1]; the cumulative sums [n, V].

    u stays 2^-52 below 1, so that the rounded product stays below the total and the index inside the support.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    target = u.clamp(max=1 - 2**-52)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).clamp_(max=weights.shape[-1] - 1), target, cdf


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Token [n] with ``sum(p[:token]) <= u * sum(p) < sum(p[:token + 1])``; ``probs`` [n, V] >= 0, u [n] float64.

    Never a token of probability 0. Large vocabularies are searched in two levels (block, then token in it), which
    needs no [n, V] array of float64.
    """
    rows, vocabulary = probs.shape
    if vocabulary <= _ONE_LEVEL:
        return _search(probs, u)[0][:, 0]
    block = min(512, vocabulary & -vocabulary)
    if block < 64:
        block = 256
        probs = F.pad(probs, (0, -vocabulary % block))
    blocks = probs.view(rows, -1, block)
    weights = blocks.sum(-1, dtype=torch.float64)
    first, target, cdf = _search(weights, u)
    chosen = weights.gather(1, first)
    inside = (target - (cdf.gather(1, first) - chosen)) / chosen  # of the target within the block, in [0, 1)
    within = blocks[torch.arange(rows, device=probs.device), first[:, 0]]
    return (first * block + _search(within, inside[:, 0].clamp(min=0.0))[0])[:, 0].clamp_(max=vocabulary - 1)


def sample(logits: Tensor, u: Tensor | None, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row of ``logits`` [n, V] and its log-prob (float32, nats) under the distribution it was drawn from.

    ``u`` [n] float64 are the uniforms; it is not read when ``params.temperature`` is 0 (argmax; the log-prob is
    then that of the temperature-1 softmax).
    """
    logits = logits.float()
    if params.temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    if params.temperature != 1.0:
        logits = logits / params.temperature
    probs = restrict(logits, params).softmax(-1)
    tokens = inverse_cdf(probs, cast(Tensor, u))
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()
