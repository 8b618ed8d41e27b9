"""Estimates of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html)."""
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token KL in nats, [T]: k1 ``r``, k2 ``r**2 / 2``, k3 ``exp(-r) - 1 + r``; ``r = logprobs - ref_logprobs``.

    k1 is unbiased but signed, k2 biased with a low variance, k3 unbiased and never negative. As a *loss*, k1 has a
    gradient of mean zero. k3 limits ``-r`` to 20 inside the exponential, so that one broken token cannot overflow.
    """
    ratio = logprobs - ref_logprobs
    if kind == "k1":
        return ratio
    if kind == "k2":
        return 0.5 * ratio * ratio
    if kind == "k3":
        return torch.expm1((-ratio).clamp_max(MAX_LOG_RATIO)) + ratio
    raise ValueError(f"unknown KL estimator {kind!r}; known: k1, k2, k3")
