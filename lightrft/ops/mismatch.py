"""Mismatch of rollout-engine and trainer log-probs, as sums that add over micro-batches and ranks."""
import torch
from torch import Tensor

SUMS = ("n", "abs_dp", "abs_dp_sq", "abs_logp", "kl_k1", "kl_k3", "x", "y", "xx", "yy", "xy", "w", "ww")


def mismatch_sums(old: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute sums over the action tokens and two maxima.

    Args:
        old: trainer log-probs [T], rollout: engine log-probs [T], mask: bool [T].

    Returns:
        float64 ``[len(SUMS)]`` (to be summed) and ``[2]`` = max |p - q|, max |log p - log q| (to be maximised).
    """
    x, y = old[mask].double(), rollout[mask].double()
    lr = x - y
    gap, w = (x.exp() - y.exp()).abs(), lr.clamp(-20, 20).exp()
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
