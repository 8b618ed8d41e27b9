"""Losses as modules: the nn.Module faces of :mod:`lightrft.ops` and of the policy losses in :mod:`lightrft.algorithms`.

All take packed ``[T]`` tensors and global denominators, and return this micro-batch's share of the loss (a scalar: the
sum over micro-batches and ranks is the loss of the optimizer step) and detached ``[T]`` metrics that mean something
where ``exp.loss_mask``. Values outside the mask may be NaN or inf and reach neither loss nor gradient.
"""
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightrft.algorithms import CORRECTIONS, POLICY_LOSSES
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.aggregate import Denominators, aggregate
from lightrft.ops.divergence import kl_estimate
from lightrft.ops.surrogate import any_below, safe_ratio
from lightrft.types import Experience
from lightrft.utils.errors import UserError

Loss = tuple[Tensor, dict[str, Tensor]]
_METRICS = ("ratio", "clip_frac_low", "clip_frac_high")  # of every policy loss
_TOKEN_FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "advantages", "returns")


def _clean(exp: Experience) -> Experience:
    """Copy of ``exp`` with 0 outside the loss mask in every float field of tokens."""
    found: dict[str, Any] = {name: exp.__dict__[name] for name in _TOKEN_FIELDS}
    cleaned: dict[str, Any] = {k: torch.where(exp.loss_mask, v, 0) for k, v in found.items() if v is not None}
    return replace(exp, **cleaned)


class PolicyLoss(nn.Module):
    """``aggregate(w * policy loss + kl_coef * KL(policy || reference) - entropy_coef * entropy)`` over the loss mask.

    A token that ``w`` or ``exp.high_entropy_mask`` leaves out stays in the denominators and the other two terms. With
    ``entropy_token_mean`` the entropy is aggregated apart, as a mean over tokens.

    Args:
        cfg: names the policy loss, the correction ``w`` and the aggregation; the KL term is there with ``use_kl_loss``.
        norm: the constant of ``seq-mean-token-sum-norm``, in tokens (``loss_agg_norm``, resolved).
    """

    def __init__(self, cfg: AlgorithmConfig | None = None, norm: float = 1.0) -> None:
        super().__init__()
        cfg = cfg or AlgorithmConfig()
        correction = CORRECTIONS.get(cfg.rollout_correction)
        self.cfg, self.norm = correction.resolve(cfg), float(norm)
        self.policy_loss, self.correction = POLICY_LOSSES.get(cfg.policy_loss).fn, correction.fn

    def denominators(self, counts: Tensor) -> Denominators:
        """Denominators from ``counts`` of :func:`lightrft.ops.aggregate.count`, summed over the micro-batches and ranks
        of one optimizer step."""
        return Denominators.of(counts, self.norm)

    def forward(self, logprobs: Tensor, entropy: Tensor | None, exp: Experience, denominators: Denominators,
                kl_coef: float, entropy_coef: float | None = None) -> Loss:
        """The loss of one micro-batch.

        Args:
            logprobs: [T], differentiable, at the sampling temperature.
            entropy: [T], or None when its coefficient is 0 and it is not logged.
            exp: ``loss_mask`` and ``advantages``; ``old_logprobs`` None means that this is the first update on the
                rollout: the old policy is this one (ratio exactly 1); ``ref_logprobs`` when the KL is in the loss.
            denominators: global counts, see :meth:`denominators`.
            kl_coef: current coefficient of the KL term (fixed or adaptive).
            entropy_coef: current coefficient of the entropy bonus (default: the fixed ``cfg.entropy_coef``).

        Returns:
            ``(loss, metrics)``; metrics: ``loss`` (all terms per token), those of the policy loss (``ratio``,
            ``clip_frac_low``, ``clip_frac_high``) and of the correction (``correction_weight``,
            ``correction_bound_frac``, ``correction_veto_frac``), ``kl_old`` (k3 estimate of KL(old || policy)),
            ``kl_ref`` (by ``cfg.kl_kind``; with a reference) and ``entropy`` (when given).
        """
        mask, exp = exp.loss_mask, _clean(exp)
        logprobs = torch.where(mask, logprobs, 0)
        if exp.old_logprobs is None:
            exp = replace(exp, old_logprobs=logprobs.detach())
        token_loss, metrics = self._policy_terms(logprobs, exp)
        weights, corrected = self._weights(exp)
        token_loss = token_loss * weights
        if exp.high_entropy_mask is not None:
            token_loss = torch.where(exp.high_entropy_mask, token_loss, 0)
        metrics = {**metrics, **corrected, "kl_old": kl_estimate(exp.old_logprobs, logprobs.detach(), "k3")}
        entropy_coef = self.cfg.entropy_coef if entropy_coef is None else entropy_coef
        token_loss, extra = self._with_kl(token_loss, logprobs, exp, kl_coef)
        extra |= {} if entropy is None else {"entropy": torch.where(mask, entropy, 0)}
        bonus = self._bonus(extra, entropy_coef)
        loss = self._aggregate(token_loss, bonus, exp, denominators)
        return loss, {k: v.detach() for k, v in {**metrics, **extra, "loss": token_loss - bonus}.items()}

    def _policy_terms(self, logprobs: Tensor, exp: Experience) -> Loss:
        """The policy loss [T] and its metrics.

        Raises:
            UserError: a registered policy loss breaks its contract.
        """
        loss, metrics = self.policy_loss(logprobs, exp, self.cfg)
        if missing := [name for name in _METRICS if name not in metrics]:
            raise UserError(
                f"policy loss {self.cfg.policy_loss!r} returns no metric {', '.join(missing)}: return (loss, "
                "ratio_metrics(ratio, at_low, at_high)), from lightrft.algorithms.base; pass ones for a loss without "
                "a ratio, and only the ratio without a clip")
        if loss.shape != logprobs.shape:
            raise UserError(f"policy loss {self.cfg.policy_loss!r} returns a loss of shape {list(loss.shape)}: return "
                            f"one number per token, {list(logprobs.shape)} here; it is masked and aggregated elsewhere")
        return loss, metrics

    def _weights(self, exp: Experience) -> Loss:
        """The correction [T] after its bounds and the veto, and its metrics."""
        cfg, weights, vetoed = self.cfg, self.correction(exp, self.cfg).detach(), torch.zeros_like(exp.loss_mask)
        bound = vetoed
        if cfg.correction_low is not None:
            bound = (weights <= cfg.correction_low) | (weights >= cast(float, cfg.correction_high))  # masked ones are 0
        if cfg.correction_veto:
            ratio = safe_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
            vetoed = any_below(ratio, cfg.correction_veto, exp.loss_mask, exp.cu_seqlens)
            weights = torch.where(vetoed, 0, weights)
        return weights, {
            "correction_weight": weights, "correction_bound_frac": bound.float(), "correction_veto_frac":
            vetoed.float()
        }

    def _with_kl(self, token_loss: Tensor, logprobs: Tensor, exp: Experience, kl_coef: float) -> Loss:
        """Return ``token_loss`` with the KL term, and the KL itself."""
        extra = {}
        if exp.ref_logprobs is not None:
            extra["kl_ref"] = kl_estimate(logprobs, exp.ref_logprobs, self.cfg.kl_kind, self.cfg.k3_max)
        if not (self.cfg.use_kl_loss and kl_coef):
            return token_loss, extra
        if not extra:
            raise ValueError(f"use_kl_loss with a KL coefficient of {kl_coef} needs ref_logprobs in the experience")
        return token_loss + kl_coef * extra["kl_ref"], extra

    def _bonus(self, extra: dict[str, Tensor], entropy_coef: float) -> Tensor | float:
        """The entropy bonus of each token."""
        if not entropy_coef:
            return 0.0
        if "entropy" not in extra:
            raise ValueError(f"entropy_coef {entropy_coef} needs the entropy of each token; got None")
        return entropy_coef * extra["entropy"]

    def _aggregate(self, token_loss: Tensor, bonus: Tensor | float, exp: Experience,
                   denominators: Denominators) -> Tensor:
        """This micro-batch's share of the loss; the bonus is subtracted by token or, when asked, as a mean apart."""
        rule = self.cfg.loss_agg_mode, denominators, self.cfg.loss_agg_norm_seqs
        if not (self.cfg.entropy_token_mean and isinstance(bonus, Tensor)):
            return aggregate(token_loss - bonus, exp.loss_mask, exp.cu_seqlens, *rule)
        apart = aggregate(bonus, exp.loss_mask, exp.cu_seqlens, "token-mean", denominators)
        return aggregate(token_loss, exp.loss_mask, exp.cu_seqlens, *rule) - apart


class ValueLoss(nn.Module):
    """The mean of ``0.5 * max((V - R)**2, (clamp(V, V_old - clip, V_old + clip) - R)**2)`` over action tokens.

    Args:
        clip: how far the value may move from the rollout's; 0 is off (``0.5 * (V - R)**2``).
    """

    def __init__(self, clip: float) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, values: Tensor, exp: Experience, denominators: Denominators) -> Loss:
        """Compare the critic's current ``values`` [T] with ``exp.returns`` and (when clipped) ``exp.values``.

        Metrics: ``clip_frac`` (where the value is outside the clip, and the clipped error the larger one), ``values``
        and ``loss``.
        """
        mask, exp = exp.loss_mask, _clean(exp)
        values = torch.where(mask, values, 0)
        error = (values - exp.returns)**2
        clipped, outside = error, torch.zeros_like(mask)
        if self.clip > 0:
            clipped = (exp.values + (values - exp.values).clamp(-self.clip, self.clip) - exp.returns)**2
            outside = (values - exp.values).abs() > self.clip  # inside, the two errors differ by a rounding
        token_loss = 0.5 * torch.maximum(error, clipped)
        metrics = {"clip_frac": (outside & (clipped > error)).float(), "values": values.detach(),
                   "loss": token_loss.detach()}  # yapf: disable
        return aggregate(token_loss, mask, exp.cu_seqlens, "token-mean", denominators), metrics


class GPTLMLoss(nn.Module):
    """``-logprobs[loss_mask].mean()``: the negative log-likelihood per token of supervised fine-tuning, in nats.

    ``exp.token_weights`` weigh the tokens of the sum; in the denominator each token of the loss counts 1.
    """

    def forward(self, logprobs: Tensor, exp: Experience, denominators: Denominators) -> Loss:
        """Return the loss of ``logprobs`` [T]; metrics: ``loss``, each token's."""
        token_loss = -torch.where(exp.loss_mask, logprobs, 0)
        weighted = token_loss if exp.token_weights is None else token_loss * exp.token_weights
        loss = aggregate(weighted, exp.loss_mask, exp.cu_seqlens, "token-mean", denominators)
        return loss, {"loss": token_loss.detach()}
