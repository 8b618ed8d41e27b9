"""Estimates of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html)."""
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


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
