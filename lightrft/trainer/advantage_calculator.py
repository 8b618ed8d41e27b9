"""Turns rewards into advantages, in one fixed order: shaping -> estimator -> normalisation -> teacher -> clip.

Every rank has the rewards of the whole rollout batch and the tokens of its own sequences. So a statistic over samples
is global, and one over tokens is a sum over ranks.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from lightrft.algorithms.base import ADVANTAGES
from lightrft.config.schema import AlgorithmConfig, RewardConfig
from lightrft.ops.divergence import kl_estimate
from lightrft.ops.returns import discounted_returns
from lightrft.ops.segment import (group_stats, last_token, masked_mean, masked_whiten, moments, segment_sum)
from lightrft.ops.selection import largest, share
from lightrft.types import Experience


def overlong_penalty(lengths: Tensor, max_len: int, buffer: int, factor: float) -> Tensor:
    """DAPO's soft overlong penalty (arXiv:2503.14476, eq. 13), <= 0: 0 up to ``max_len - buffer``, then linear to
    ``-factor`` at ``max_len``.

    Args:
        lengths: response lengths in tokens [B].
    """
    over = (lengths - (max_len - buffer)).clamp(0, buffer)
    return -over / buffer * factor


def token_rewards(exp: Experience, kl: Tensor | None, kl_coef: float) -> Tensor:
    """[T]: ``-kl_coef * kl_t`` on action tokens plus the sample's reward on its last action token.

    With rewards per step, each is on the token that ends its step instead.
    """
    mask = exp.loss_mask
    out = torch.zeros(exp.num_tokens) if kl is None else torch.where(mask, -kl_coef * kl, 0.0)
    index, valid = last_token(mask, exp.cu_seqlens)
    keep = valid & exp.ranks.own(exp.scored)
    rest = exp.ranks.own(exp.rewards)
    if exp.step_rewards is not None:
        steps = torch.where(mask & exp.per_token(exp.scored), exp.step_rewards.nan_to_num(), 0.0)
        out, rest = out + steps, rest - segment_sum(steps, exp.cu_seqlens)
    return out.index_add(0, index[keep], rest[keep])


def _mean(values: Tensor) -> float:
    """Return the mean as a number; 0 where there is no value."""
    return values.float().mean().item() if len(values) else 0.0


def _shape_each(exp: Experience, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to the rewards and to their baseline, if any, so that both stay on one scale."""
    exp.rewards = change(exp.rewards)
    if exp.baseline_rewards is not None:
        exp.baseline_rewards = change(exp.baseline_rewards)


def trainable_samples(exp: Experience, cfg: RewardConfig) -> Tensor:
    """bool [B]: samples that stay in the loss. They are scored and, with ``mask_truncated``, not truncated."""
    return exp.scored & ~exp.truncated if cfg.mask_truncated else exp.scored


class AdvantageCalculator:
    """Fills ``rewards``, ``token_rewards``, ``advantages``, ``returns``, ``high_entropy_mask`` and the final
    ``loss_mask`` of a rollout batch.

    Args:
        cfg: estimator, KL and normalisation options.
        reward: shaping options.
        generate_max_len: longest response in tokens, for the overlong penalty; ``max_len`` is its current value.
    """

    def __init__(self, cfg: AlgorithmConfig, reward: RewardConfig, generate_max_len: int) -> None:
        self.cfg, self.reward, self.max_len = cfg, reward, generate_max_len
        self.estimator = ADVANTAGES.get(cfg.advantage_estimator)
        self.moments = RunningMoments()

    def __call__(self, exp: Experience, kl_coef: float = 0.0) -> dict[str, float]:
        """Fill the batch in place, on the CPU; return ``reward/*``, ``group/*``, ``advantage/*``. A collective."""
        metrics = self._shape(exp)
        self._drop_from_loss(exp)
        metrics |= self._group_metrics(exp)  # before the KL, which would hide that rewards do not differ
        kl = self._reward_kl(exp)
        if kl is not None and self.cfg.kl_in_outcome:
            exp.rewards = exp.rewards - kl_coef * exp.ranks.gather(segment_sum(kl, exp.cu_seqlens, exp.drawn))
            exp.token_rewards = token_rewards(exp, None, 0.0)
        else:
            exp.token_rewards = token_rewards(exp, kl, kl_coef)
        exp.advantages = torch.where(exp.loss_mask, self.estimator.fn(exp, self.cfg), 0.0)
        if exp.values is not None:
            exp.returns = exp.advantages + exp.values
        if self.cfg.high_entropy_token_ratio and exp.entropies is not None:
            count = share(self.cfg.high_entropy_token_ratio, exp.loss_mask, exp.ranks)
            exp.high_entropy_mask = largest(exp.entropies, count, exp.loss_mask, exp.cu_seqlens, exp.ranks)
        metrics |= self._normalise(exp)
        if kl is not None:
            metrics["reward/kl"] = masked_mean(kl, exp.loss_mask, exp.ranks).item()
        return metrics

    def _shape(self, exp: Experience) -> dict[str, float]:
        """Apply length penalty, running normalisation and clip; measure the raw reward before them."""
        raw = exp.rewards[exp.scored]
        metrics = {
            "reward/mean": raw.mean().item(), "reward/std": raw.std(
                correction=0).item(), "reward/min": raw.min().item(), "reward/max": raw.max().item()
        } if len(raw) else dict.fromkeys(("reward/mean", "reward/std", "reward/min", "reward/max"), 0.0)
        cfg = self.reward
        if cfg.overlong_buffer:
            metrics["reward/overlong_penalty"] = self._penalise(exp)
        if cfg.reward_running_norm:
            self.moments.update(exp.rewards[exp.scored])
            _shape_each(exp, lambda rewards: self.moments.normalise(rewards, cfg.reward_running_norm_minus_mean))
        if cfg.reward_clip:
            metrics["reward/clip_frac"] = _mean(exp.rewards[exp.scored].abs() > cfg.reward_clip)
            _shape_each(exp, lambda rewards: rewards.clamp(-cfg.reward_clip, cfg.reward_clip))
        return metrics

    def _penalise(self, exp: Experience) -> float:
        """Add the overlong penalty to rewards and baseline, and to the parts with weight 1; return its mean."""
        cfg = self.reward
        buffer = cfg.overlong_buffer_len or max(self.max_len // 5, 1)  # the paper: 4096 of 20480

        def penalty(lengths: Tensor) -> Tensor:
            return overlong_penalty(lengths, self.max_len, buffer, cfg.overlong_buffer_penalty_factor)

        own = penalty(exp.ranks.gather(segment_sum(exp.drawn, exp.cu_seqlens)).float())
        exp.rewards = exp.rewards + own
        if exp.baseline_rewards is not None:
            exp.baseline_rewards = exp.baseline_rewards + penalty(exp.baseline_lengths)
        if exp.reward_parts is not None:
            exp.reward_parts = torch.cat([exp.reward_parts, own[:, None]], dim=1)
            exp.part_weights = torch.cat([exp.part_weights, torch.ones(len(own), 1)], dim=1)
        return _mean(own[exp.scored])

    def _drop_from_loss(self, exp: Experience) -> None:
        """Remove unscored samples, and with ``mask_truncated`` truncated ones, from the loss."""
        exp.loss_mask = exp.loss_mask & exp.per_token(trainable_samples(exp, self.reward))

    def _reward_kl(self, exp: Experience) -> Tensor | None:
        if exp.ref_logprobs is None or self.cfg.use_kl_loss:
            return None
        return kl_estimate(exp.old_logprobs, exp.ref_logprobs, self.cfg.kl_kind, self.cfg.k3_max)

    def _group_metrics(self, exp: Experience) -> dict[str, float]:
        mean, _, count, spread = group_stats(exp.rewards, exp.group_ids, exp.scored)
        flat = (count > 1) & (spread <= self.cfg.zero_spread)
        alone = (count == 1) & exp.scored
        metrics = {"group/zero_spread_frac": flat.float().mean().item(), "group/singletons": alone.sum().item()}
        if self.estimator.needs_positive:
            lost = (count > 1) & ~flat & (mean <= 0)
            metrics["group/nonpositive_mean_frac"] = lost.float().mean().item()
        return metrics

    def _teach(self, exp: Experience, advantages: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Add the teacher's term, ``kd_coef * (log p_teacher - log p)``, to ``advantages`` [T].

        Its policy gradient minimises KL(policy || teacher) at every token; with ``kd_gamma`` a token also gets the
        discounted terms of later tokens (arXiv:2306.08543). It needs no baseline, so it comes after estimator and
        whitening, and the critic does not learn it.
        """
        if exp.teacher_logprobs is None:
            return advantages, {}
        gap = exp.teacher_logprobs - exp.old_logprobs
        taught = discounted_returns(gap, exp.loss_mask, exp.cu_seqlens, self.cfg.kd_gamma)
        mean = masked_mean(-gap, exp.loss_mask, exp.ranks).item()
        return advantages + self.cfg.kd_coef * taught, {"reward/teacher_kl": mean}

    def _normalise(self, exp: Experience) -> dict[str, float]:
        """Whiten at most once, add the teacher's part, then clip; the statistics are taken before the clip."""
        mask, adv = exp.loss_mask, exp.advantages
        if self.cfg.advantages_norm:
            adv = masked_whiten(adv, mask, unbiased=self.cfg.whiten_unbiased, ranks=exp.ranks)
        adv, taught = self._teach(exp, adv)
        kept = adv[mask]
        found = moments(kept, exp.ranks)
        metrics = {
            "advantage/mean": found.mean, "advantage/std": found.std, "advantage/min": found.min, "advantage/max":
            found.max
        } | taught
        if self.cfg.advantage_clip:
            clipped = (kept.abs() > self.cfg.advantage_clip).float()
            metrics["advantage/clip_frac"] = moments(clipped, exp.ranks).mean
            adv = adv.clamp(-self.cfg.advantage_clip, self.cfg.advantage_clip)
        exp.advantages = adv
        return metrics

    def state_dict(self) -> dict[str, float]:
        """Return the state of the running normalisation."""
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self.moments.load_state_dict(state)


def get_advantage_calculator(cfg: AlgorithmConfig | str, reward: RewardConfig | None = None,
                             generate_max_len: int = 1024) -> AdvantageCalculator:
    """Return the calculator of the configured estimator, or of its name with the defaults; an unknown name is an error
    that lists the known ones."""
    cfg = AlgorithmConfig(advantage_estimator=cfg) if isinstance(cfg, str) else cfg
    return AdvantageCalculator(cfg, reward or RewardConfig(), generate_max_len)


class RunningMoments:
    """Running mean and variance, by the parallel update of Welford / Chan et al. (1979) in float64.

    ``std`` is unbiased, and 1 until two values were seen.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0.0, 0.0, 0.0

    def update(self, values: Tensor) -> None:
        """Add a batch of any shape; an empty one changes nothing."""
        if values.numel() == 0:
            return
        values = values.double()
        n, mean = float(values.numel()), values.mean().item()
        delta, total = mean - self.mean, self.count + n
        self.m2 += ((values - mean)**2).sum().item() + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation of all values seen."""
        variance = self.m2 / (self.count - 1) if self.count > 1 else 1.0
        return variance**0.5 if variance > 0 else 1.0

    def normalise(self, values: Tensor, minus_mean: bool) -> Tensor:
        """Divide values by the running std, after centring with ``minus_mean``."""
        centred = values - self.mean if minus_mean else values
        return torch.div(centred, self.std)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]
