"""Divergence of two models: estimates of the KL, rollout against trainer, and a student from its teacher.

The estimates of KL(policy || reference) need samples of the policy (http://joschu.net/blog/kl-approx.html). The
mismatch of rollout engine and trainer is a set of sums that add over micro-batches and ranks. So are quantiles: tokens
are counted in the bins of a histogram, and never gathered.

Student and teacher are compared by log-probs ``[N, V]`` of whole distributions. A sparse teacher has ``k`` tokens per
row and the mass of all others in one more column: the divergence of the coarser distributions is a lower bound of the
whole one, and never mistakes missing mass for mass that the student should move.
"""
import math
from functools import lru_cache

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats, to which log-ratios are limited before they are exponentiated
DIVERGENCES = ("forward", "reverse", "js")
SUMS = ("n", "abs_dp", "abs_dp_sq", "abs_logp", "kl_k1", "kl_k3", "x", "y", "xx", "yy", "xy", "w", "ww")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str, k3_max: float = 0.0) -> Tensor:
    """Per-token KL in nats, [T]: k1 ``r``, k2 ``r**2 / 2``, k3 ``exp(-r) - 1 + r``; ``r = logprobs - ref_logprobs``.

    k1 is unbiased but signed, k2 biased with a low variance, k3 unbiased and never negative. k3 limits ``-r`` to 20
    inside the exponential, so that one broken token cannot overflow, and is at most ``k3_max`` (0: no limit), beyond
    which its gradient is 0.

    As a *loss*, k1 has a gradient of mean zero, k2 that of KL(policy || reference) and k3 that of
    KL(reference || policy) (arXiv:2510.01555). ``k1+`` and ``k3+`` have the value of k1 and k3 and the gradient of k2.
    """
    if kind in ("k1+", "k3+"):
        value, path = (kl_estimate(logprobs, ref_logprobs, each, k3_max) for each in (kind[:-1], "k2"))
        return value.detach() + (path - path.detach())
    ratio = logprobs - ref_logprobs
    if kind == "k1":
        return ratio
    if kind == "k2":
        return 0.5 * ratio * ratio
    if kind == "k3":
        k3 = torch.expm1((-ratio).clamp_max(MAX_LOG_RATIO)) + ratio
        return k3.clamp_max(k3_max) if k3_max else k3
    raise ValueError(f"unknown KL estimator {kind!r}; known: k1, k2, k3, k1+, k3+")


def binary_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """``p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))`` of ``p = exp(logprobs)`` and ``q = exp(other)``: [T] nats.

    The KL between "this token" and "any other"; finite, also where a probability rounds to 1.
    """
    rest, other_rest = (-torch.expm1(x).clamp_max(-torch.finfo(x.dtype).tiny) for x in (logprobs, other))
    return logprobs.exp() * (logprobs - other) + rest * (rest.log() - other_rest.log())


@lru_cache(maxsize=None)
def _edges(device: torch.device) -> Tensor:
    """Upper edges of the bins of gaps, [BINS]: 0, 20 per decade from 1e-8 to 1e3, infinity."""
    decades = torch.arange(-160, 61, dtype=torch.float64) / 20
    ends = torch.tensor([0.0, math.inf], dtype=torch.float64)
    return torch.cat([ends[:1], 10**decades, ends[1:]]).to(device)


BINS = 223
P999 = 0.999


def histogram(gaps: Tensor, mask: Tensor) -> Tensor:
    """Count the ``gaps`` [T] that ``mask`` [T] keeps, none negative, per bin: float64 [BINS]. NaN counts as infinite.

    The counts of micro-batches and ranks add up. No value leaves the device.
    """
    bins = torch.bucketize(gaps, _edges(gaps.device)).clamp_max(BINS - 1)
    return torch.zeros(BINS, dtype=torch.float64, device=gaps.device).index_add_(0, bins, mask.double())


def upper_quantile(counts: Tensor, share: float) -> float:
    """Return a gap that at least ``share`` of the counted tokens do not exceed: the upper edge of a bin.

    It is at most 12.3 % above the quantile, within the range of the bins. At least one token always ranks above, so
    that no single token decides: of fewer than ``1 / (1 - share)`` tokens it is the second largest, of one 0.
    """
    total = counts.sum().item()
    rank = min(math.ceil(share * total), total - 1)
    return _edges(torch.device("cpu"))[int((counts.cpu().cumsum(0) < rank).sum())].item()


def gap_sums(gaps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce the ``gaps`` [T] that ``mask`` [T] keeps to float64 ``[2 + BINS]`` (number, sum, counts per bin; to be
    summed) and their maximum []."""
    kept = torch.where(mask, gaps.double(), 0.0)
    return torch.cat([torch.stack([mask.sum().double(), kept.sum()]), histogram(gaps.double(), mask)]), kept.max()


def gap_metrics(sums: Tensor) -> dict[str, float]:
    """Return the mean and the 99.9 % quantile of what :func:`gap_sums` reduced; without tokens both are 0."""
    return {"mean": (sums[1] / sums[0].clamp_min(1)).item(), "p999": upper_quantile(sums[2:], P999)}


def mismatch_sums(old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute sums over the action tokens, counts of their gaps, and two maxima, without a host sync.

    Args:
        old: trainer log-probs [T], rollout: engine log-probs [T], mask: bool [T].

    Returns:
        float64 ``[len(SUMS) + 2 * BINS]`` (sums and two histograms; to be summed) and ``[2]`` (to be maximised). The
        histograms and the maxima are those of |p - q| and |log p - log q|.
    """
    x, y = (torch.where(mask, values, 0.0).double() for values in (old, rollout))
    lr = x - y
    gap, w = (x.exp() - y.exp()).abs(), lr.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    columns = [torch.ones_like(x), gap, gap * gap, lr.abs(), -lr, lr.expm1() - lr, x, y, x * x, y * y, x * y, w, w * w]
    sums = torch.where(mask, torch.stack(columns), 0.0).sum(-1)
    return torch.cat([sums, histogram(gap, mask), histogram(lr.abs(), mask)]), torch.stack([gap.max(), lr.abs().max()])


def mismatch_metrics(sums: Tensor, peaks: Tensor) -> dict[str, float]:
    """Return the number of tokens, means, 99.9 % quantiles and maxima of |p - q| and |log p - log q|, KL(rollout ||
    trainer) as k1 and k3, Pearson, ESS, chi2.

    The weight of a token is w = p_trainer / p_rollout; ESS = (sum w)^2 / (n sum w^2) in (0, 1]; chi2 = E[w^2] - 1.
    Without action tokens everything is 0.
    """
    values, dp, dlogp = sums.split([len(SUMS), BINS, BINS])
    s = dict(zip(SUMS, values.tolist()))
    n = max(s["n"], 1.0)
    cov = s["xy"] / n - s["x"] * s["y"] / n**2
    var = max(s["xx"] / n - (s["x"] / n)**2, 0.0) * max(s["yy"] / n - (s["y"] / n)**2, 0.0)
    return {
        "tokens": s["n"],
        "abs_dp_mean": s["abs_dp"] / n,
        "abs_dp_std": max(s["abs_dp_sq"] / n - (s["abs_dp"] / n)**2, 0.0)**0.5,
        "abs_dp_p999": upper_quantile(dp, P999),
        "abs_dp_max": peaks[0].item(),
        "abs_logp_mean": s["abs_logp"] / n,
        "abs_logp_p999": upper_quantile(dlogp, P999),
        "abs_logp_max": peaks[1].item(),
        "kl_k1": s["kl_k1"] / n,
        "kl_k3": s["kl_k3"] / n,
        "pearson": cov / var**0.5 if var > 0 else 0.0,
        "ess": s["w"]**2 / (n * s["ww"]) if s["ww"] else 0.0,
        "chi2": s["ww"] / n - 1.0 if s["n"] else 0.0,
    }


def divergence(student: Tensor, teacher: Tensor, kind: str, mix: float = 0.5) -> Tensor:
    """Return the divergence of log-probs ``student`` and ``teacher`` [N, V]: [N] nats, 0 where they are equal.

    ``forward`` is KL(teacher || student), whose gradient is that of the cross-entropy against the teacher
    (arXiv:1503.02531); ``reverse`` KL(student || teacher) (arXiv:2306.08543); ``js`` the generalized Jensen-Shannon
    divergence ``mix * KL(teacher || m) + (1 - mix) * KL(student || m)``, ``m = mix * teacher + (1 - mix) * student``
    (arXiv:2306.13649, eq. 1).
    """
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    if kind == "js":
        mixture = torch.logaddexp(teacher + math.log(mix), student + math.log1p(-mix))
        return mix * _kl(teacher, mixture) + (1 - mix) * _kl(student, mixture)
    raise ValueError(f"unknown divergence {kind!r}; known: {', '.join(DIVERGENCES)}")


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """``sum(exp(p) * (p - q))`` of log-probs [N, V]; a token that p never has adds nothing."""
    gap = torch.where(p == -torch.inf, 0, p - q)
    return (p.exp() * gap).sum(-1)


def top_tokens(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Reduce log-probs [N, V] to the ids [N, k] of the ``k < V`` likeliest tokens and :func:`coarse` [N, k + 1]."""
    ids = logprobs.topk(k, dim=-1).indices
    return ids, coarse(logprobs, ids)


def coarse(logprobs: Tensor, ids: Tensor) -> Tensor:
    """``cat([logprobs[ids], log(1 - sum(exp(logprobs[ids])))])`` by row, [N, V] -> [N, k + 1], for ``k < V`` ids."""
    others = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), others], dim=-1)
