"""Divergence of two policies by their log-probs of the same tokens: estimates of the KL, and rollout against trainer.

The estimates of KL(policy || reference) need samples of the policy (http://joschu.net/blog/kl-approx.html). The
mismatch of rollout engine and trainer is a set of sums that add over micro-batches and ranks.
"""
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats, to which log-ratios are limited before they are exponentiated
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


def mismatch_sums(old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute sums over the action tokens and two maxima.

    Args:
        old: trainer log-probs [T], rollout: engine log-probs [T], mask: bool [T].

    Returns:
        float64 ``[len(SUMS)]`` (to be summed) and ``[2]`` = max |p - q|, max |log p - log q| (to be maximised).
    """
    x, y = old[mask].double(), rollout[mask].double()
    lr = x - y
    gap, w = (x.exp() - y.exp()).abs(), lr.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    columns = [torch.ones_like(x), gap, gap * gap, lr.abs(), -lr, lr.expm1() - lr, x, y, x * x, y * y, x * y, w, w * w]
    peaks = [values.max() if len(x) else x.new_zeros(()) for values in (gap, lr.abs())]
    return torch.stack([column.sum() for column in columns]), torch.stack(peaks)


def mismatch_metrics(sums: Tensor, peaks: Tensor) -> dict[str, float]:
    """Return the number of tokens, means and maxima of |p - q| and |log p - log q|, KL(rollout || trainer) as k1 and
    k3, Pearson, ESS, chi2.

    The weight of a token is w = p_trainer / p_rollout; ESS = (sum w)^2 / (n sum w^2) in (0, 1]; chi2 = E[w^2] - 1.
    Without action tokens everything is 0.
    """
    s = dict(zip(SUMS, sums.tolist()))
    n = max(s["n"], 1.0)
    cov = s["xy"] / n - s["x"] * s["y"] / n**2
    var = max(s["xx"] / n - (s["x"] / n)**2, 0.0) * max(s["yy"] / n - (s["y"] / n)**2, 0.0)
    return {
        "tokens": s["n"],
        "abs_dp_mean": s["abs_dp"] / n,
        "abs_dp_std": max(s["abs_dp_sq"] / n - (s["abs_dp"] / n)**2, 0.0)**0.5,
        "abs_dp_max": peaks[0].item(),
        "abs_logp_mean": s["abs_logp"] / n,
        "abs_logp_max": peaks[1].item(),
        "kl_k1": s["kl_k1"] / n,
        "kl_k3": s["kl_k3"] / n,
        "pearson": cov / var**0.5 if var > 0 else 0.0,
        "ess": s["w"]**2 / (n * s["ww"]) if s["ww"] else 0.0,
        "chi2": s["ww"] / n - 1.0 if s["n"] else 0.0,
    }
