"""Corrections of the train / rollout mismatch: {token, product, geometric mean} x {truncate, mask}.

``w = exp(old_train - rollout)``, detached. Functions return [T]; the product and the mean have one value per sequence.
Their docstrings make the table of algorithms. What is masked stays in the denominators.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import keep_inside, safe_log_ratio, safe_ratio, sequence_product, sequence_ratio
from lightrft.types import Experience


def _token(exp: Experience) -> Tensor:
    """[T]: the ratio of each token."""
    return safe_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)


def _product(exp: Experience) -> Tensor:
    """[T]: the product over a response."""
    return sequence_product(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask, exp.cu_seqlens)


def _geometric(exp: Experience) -> Tensor:
    """[T]: the geometric mean over a response."""
    log_ratio = safe_log_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
    return sequence_ratio(log_ratio, exp.loss_mask, exp.cu_seqlens)


@correction("none")
def none(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """No correction: the rollout is taken as a sample of the trainer's own policy.

    Paper: the "no correction" baseline of IMPALA, Espeholt et al. 2018, https://arxiv.org/abs/1802.01561
    Equation: w_t = 1
    Degenerate: biased by as much as engine and trainer disagree, which is reported in every step.
    Deviation: none.
    """
    return torch.ones_like(exp.loss_mask, dtype=torch.float32)


@correction("bypass")
def bypass(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Bypass: the engine's log-probs are the old log-probs, which saves the forward pass that computes them.

    Paper: plain PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose old policy is the one that sampled
        (against a separate proximal policy: Hilton et al. 2021, https://arxiv.org/abs/2110.00641)
    Equation: w_t = 1, rho_t = pi_t / pi_rollout_t in the policy loss
    Degenerate: engine and trainer agree: none.
    Deviation: none. The clip of the policy loss then bounds mismatch and update together.
    """
    return torch.ones_like(exp.loss_mask, dtype=torch.float32)


@correction("tis", low=0.0, high=2.0)
def tis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """TIS: the weight of each token, truncated.

    Paper: Yao et al. 2025, https://openreview.net/forum?id=8MHqvb4lK9; truncation: Ionides 2008,
        https://doi.org/10.1198/106186008X320456
    Equation: w_t = clip(pi_old_t / pi_rollout_t, low, high)
    Degenerate: engine and trainer agree: 1.
    Deviation: there is a lower bound too; 0, the default, is the paper's one-sided truncation (high 2).
    """
    return _token(exp).clamp(*correction_bounds(cfg))


@correction("mis", low=0.0, high=2.0, masks=True)
def mis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """MIS: the weight of each token, and no gradient from tokens whose weight is too large.

    Paper: Liu, Li et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse, continued in
        https://arxiv.org/abs/2512.23075
    Equation: w_t = pi_old_t / pi_rollout_t where low <= w_t <= high, else 0
    Degenerate: engine and trainer agree: 1.
    Deviation: there is a lower bound too; 0, the default, is the one-sided mask (high 2). Masked tokens stay in the
        denominators.
    """
    return keep_inside(_token(exp), *correction_bounds(cfg))


@correction("icepop", low=0.5, high=5.0, masks=True)
def icepop(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """IcePop: the weight of each token, and no gradient from tokens on which engine and trainer disagree either way.

    Paper: Ling Team 2025 (Ring-1T), https://arxiv.org/abs/2510.18855
    Equation: w_t = M(pi_old_t / pi_rollout_t), M(k) = k where low <= k <= high, else 0
    Degenerate: engine and trainer agree: 1; low = 0: mis.
    Deviation: none (low 0.5, high 5). Masked tokens stay in the denominators.
    """
    return keep_inside(_token(exp), *correction_bounds(cfg))


@correction("seq_tis", low=0.0, high=2.0)
def seq_tis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Sequence-level TIS: the probability ratio of the whole response, truncated.

    Paper: Liu, Li et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse; truncation: Ionides
        2008,
        https://doi.org/10.1198/106186008X320456
    Equation: w_t = clip(prod_s pi_old_s / pi_rollout_s, low, high), s over the action tokens of the response
    Degenerate: one action token: tis.
    Deviation: there is a lower bound too; 0, the default, is one-sided (high 2). The log of the product is limited to
        +-20 nats.
    """
    return _product(exp).clamp(*correction_bounds(cfg))


@correction("seq_mis", low=0.0, high=2.0, masks=True)
def seq_mis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Sequence-level MIS: the probability ratio of the whole response; responses outside the bounds get no gradient.

    Paper: Liu, Li et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse, continued in
        https://arxiv.org/abs/2512.23075
    Equation: w_t = prod_s pi_old_s / pi_rollout_s where low <= w_t <= high, else 0, s over the action tokens
    Degenerate: one action token: mis.
    Deviation: there is a lower bound too; 0, the default, is one-sided (high 2). The log of the product is limited to
        +-20 nats. Masked sequences stay in the denominators.
    """
    return keep_inside(_product(exp), *correction_bounds(cfg))


@correction("geo_tis", low=0.0, high=2.0)
def geo_tis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Geometric TIS: the geometric mean of a response's token weights, truncated; it does not grow with the length.

    Paper: the length-normalised ratio of GSPO, Zheng et al. 2025, https://arxiv.org/abs/2507.18071; truncation: Ionides
        2008, https://doi.org/10.1198/106186008X320456
    Equation: w_t = clip((prod_s pi_old_s / pi_rollout_s) ** (1 / n), low, high), s over the n action tokens
    Degenerate: one action token: tis.
    Deviation: GSPO's ratio (eq. 7) is of the policy now to the old one, this of the old one to the engine (high 2).
    """
    return _geometric(exp).clamp(*correction_bounds(cfg))


@correction("geo_mis", low=0.999, high=1.001, masks=True)
def geo_mis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Geometric MIS: the geometric mean of a response's token weights; responses outside the bounds get no gradient.

    Paper: Liu, Li et al. 2025, "When Speed Kills Stability", part 3, https://richardli.xyz/rl-collapse-3, continued in
        https://arxiv.org/abs/2512.23075
    Equation: w_t = (prod_s pi_old_s / pi_rollout_s) ** (1 / n) where low <= w_t <= high, else 0, s over the n action
        tokens
    Degenerate: one action token: mis with the same bounds.
    Deviation: the mean itself is the weight, and the log-ratio of a token is limited to +-20 nats. The defaults 0.999
        and
        1.001 suit engines without quantisation. Masked sequences stay in the denominators.
    """
    return keep_inside(_geometric(exp), *correction_bounds(cfg))
