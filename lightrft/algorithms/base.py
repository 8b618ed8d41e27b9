"""Registries of the algorithm suite, the contract of their entries and what outcome-based advantages share.

advantage       ``(exp, cfg) -> [T]``                    from ``token_rewards``, ``rewards``, ``group_ids`` ...
policy loss     ``(logprobs, exp, cfg) -> (loss [T], metrics)``, metrics with ``ratio`` and ``clip_frac_{low,high}``
correction      ``(exp, cfg) -> weights [T]``            train / rollout mismatch, detached

``exp`` is a packed :class:`lightrft.types.Experience`, ``cfg`` the :class:`lightrft.config.schema.AlgorithmConfig`.
Masking, aggregation and denominators happen once, elsewhere (:mod:`lightrft.ops.aggregate`). Metrics are ``[T]``
tensors that the caller averages over the loss mask of the whole mini-batch.

An algorithm may declare its own options: lines of a dataclass derived from ``AlgorithmConfig``, in its file, that its
decorator takes as ``options``. They are flags and YAML keys like the others, and ``cfg`` has their values.

Advantages are called once per rollout. The [B] fields of ``exp`` describe the samples of all ranks, so a statistic over
them is global. Its [T] fields describe the sequences of this rank: a statistic over tokens takes ``exp.ranks``, and
``exp.per_token`` carries a value per sample to the tokens. Advantages are 0 outside ``loss_mask`` and on samples that
were not scored; those samples enter no statistic. ``exp.token_rewards`` holds the penalties of each action token (KL in
the reward) and ``exp.rewards`` once more on the last action token.

A module's docstring (in a file of several algorithms, a function's) is data as well: its first line and its fields
``Paper:``, ``Equation:``, ``Degenerate:`` and ``Deviation:`` make the table of algorithms
(:func:`lightrft.algorithms.table`).
"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrft.config.foreign_values import ALGORITHMS, SYNONYMS
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import declare
from lightrft.ops.returns import discounted_returns
from lightrft.ops.segment import GroupStats, group_stats, last_token
from lightrft.types import Experience
from lightrft.utils.errors import UserError
from lightrft.utils.registry import Chosen, Registry

AdvantageFn = Callable[[Experience, AlgorithmConfig], Tensor]
PolicyLossFn = Callable[[Tensor, Experience, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]
SelectFn = Callable[[Tensor, Experience, AlgorithmConfig, int], Tensor]
CorrectionFn = Callable[[Experience, AlgorithmConfig], Tensor]
# of the decorators: the ``cfg`` of a function may be declared with the type that has its own options
A = TypeVar("A", bound=Callable[..., Tensor])
P = TypeVar("P", bound=Callable[..., tuple[Tensor, dict[str, Tensor]]])


@dataclass(frozen=True)
class Advantage(Chosen):
    """Registered advantage estimator with the requirements that the trainer must know before it runs."""
    fn: AdvantageFn
    needs_group: bool = False  # refuses n_samples_per_prompt = 1
    needs_critic: bool = False
    whitens: bool = False  # already normalises over the whole rollout batch
    needs_greedy: bool = False  # reads exp.baseline_rewards, the reward of one greedy response per prompt
    needs_parts: bool = False  # reads exp.reward_parts and exp.part_weights in place of exp.rewards
    takes_steps: bool = False  # defined for rewards of single steps, exp.step_rewards
    needs_positive: bool = False  # a group whose mean reward is not above 0 cannot be used

    @property
    def takes_turns(self) -> bool:
        """True if the reward of a turn belongs to the last token of the turn; others take the sum of the turns."""
        return self.takes_steps and not self.needs_group


@dataclass(frozen=True)
class Surrogate(Chosen):
    """Registered policy loss with the requirements that the trainer must know before it runs.

    ``selects(logprobs [T], exp, cfg, seed) -> bool [T]`` is called before the backward passes of a mini-batch with the
    rollout batch of all ranks, its ``loss_mask`` narrowed to the mini-batch, and the current log-probs there. Its
    result is the same on every rank; ``fn`` reads it from ``exp.selected``.
    """
    fn: PolicyLossFn
    needs_old: bool = True  # its value depends on the policy of the rollout; False: it has no ratio
    skips_zero: bool = False  # no gradient where the advantage is 0: samples without advantage need no pass
    selects: SelectFn | None = None


@dataclass(frozen=True)
class Correction(Chosen):
    """Registered correction; ``low`` and ``high`` are its option defaults (None: it has no bounds).

    ``fn`` gets the bounds in use from :func:`correction_bounds`.
    """
    fn: CorrectionFn
    low: float | None = None
    high: float | None = None
    masks: bool = False  # weights outside the bounds become 0

    def resolve(self, cfg: AlgorithmConfig) -> AlgorithmConfig:
        """Return ``cfg`` with the defaults for bounds that were not given."""
        low, high = cfg.correction_low, cfg.correction_high
        return replace(cfg, correction_low=self.low if low is None else low,
                       correction_high=self.high if high is None else high)


ADVANTAGES: Registry[Advantage] = Registry("advantage estimator", ALGORITHMS, SYNONYMS["advantage_estimator"],
                                           "advantage(NAME, ...) of lightrft.algorithms.base")
POLICY_LOSSES: Registry[Surrogate] = Registry("policy loss", ALGORITHMS, SYNONYMS["policy_loss"],
                                              "policy_loss(NAME, ...) of lightrft.algorithms.base")
CORRECTIONS: Registry[Correction] = Registry("rollout correction", ALGORITHMS, SYNONYMS["rollout_correction"],
                                             "correction(NAME, ...) of lightrft.algorithms.base")
REGISTRIES: dict[str, Registry[Any]] = {  # by the option that names one of the entries
    "advantage_estimator": ADVANTAGES, "policy_loss": POLICY_LOSSES, "rollout_correction": CORRECTIONS
}


def advantage(*names: str, needs_group: bool = False, needs_critic: bool = False, whitens: bool = False,
              needs_greedy: bool = False, needs_parts: bool = False, needs_positive: bool = False,
              takes_steps: bool = False, reads: tuple[str, ...] | None = None,
              options: type[AlgorithmConfig] | None = None) -> Callable[[A], A]:
    """Register an advantage estimator under ``names`` with its requirements; for ``options``, see the module."""

    def add(fn: A) -> A:
        entry = Advantage(fn, needs_group, needs_critic, whitens, needs_greedy, needs_parts, takes_steps=takes_steps,
                          needs_positive=needs_positive, reads=reads, own=declare(AlgorithmConfig, options, reads))
        ADVANTAGES.register(*names)(entry)
        return fn

    return add


def policy_loss(*names: str, needs_old: bool = True, skips_zero: bool = False, selects: SelectFn | None = None,
                reads: tuple[str, ...] | None = None, options: type[AlgorithmConfig] | None = None) -> Callable[[P], P]:
    """Register a policy loss under ``names`` with its requirements; for ``options``, see the module."""

    def add(fn: P) -> P:
        POLICY_LOSSES.register(*names)(Surrogate(fn, needs_old, skips_zero, selects, reads=reads,
                                                 own=declare(AlgorithmConfig, options, reads)))
        return fn

    return add


def correction(*names: str, low: float | None = None, high: float | None = None, masks: bool = False,
               options: type[AlgorithmConfig] | None = None) -> Callable[[A], A]:
    """Register a correction under ``names`` with its default bounds; masked tokens stay in the denominators."""

    def add(fn: A) -> A:
        reads: tuple[str, ...] = () if low is None else ("correction_low", "correction_high", "correction_veto")
        CORRECTIONS.register(*names)(Correction(fn, low, high, masks, reads=reads,
                                                own=declare(AlgorithmConfig, options, reads)))
        return fn

    return add


def correction_bounds(cfg: AlgorithmConfig) -> tuple[float, float]:
    """Return the bounds of the correction's weight; 0 and inf where there is none."""
    low, high = cfg.correction_low, cfg.correction_high
    return 0.0 if low is None else low, inf if high is None else high


def clip_bounds(cfg: AlgorithmConfig) -> tuple[float, float]:
    """Return the distances by which a ratio may fall below and rise above 1."""
    return cfg.eps_clip, cfg.eps_clip if cfg.eps_clip_high is None else cfg.eps_clip_high


def ratio_metrics(ratio: Tensor, at_low: Tensor | None = None, at_high: Tensor | None = None,
                  **more: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a policy loss, [T] each.

    Args:
        ratio: of the new and the old policy; ones if the loss has none.
        at_low: bool [T], the tokens at which the lower bound is active; None: there is no such bound.
        at_high: likewise for the upper bound.
        more: further metrics [T], by name.

    Raises:
        UserError: ``at_low`` or ``at_high`` is the bound itself.
    """
    for name, active in (("at_low", at_low), ("at_high", at_high)):
        if active is not None and (not isinstance(active, Tensor) or active.shape != ratio.shape):
            sign = "<" if name == "at_low" else ">"
            raise UserError(f"ratio_metrics: {name} is {active!r}, expected the tokens at which the bound is active, "
                            f"bool {list(ratio.shape)}: for example ratio {sign} bound, or nothing without a bound")
    nowhere = torch.zeros_like(ratio)
    low, high = (nowhere if active is None else active.float() for active in (at_low, at_high))
    return {"ratio": ratio, "clip_frac_low": low, "clip_frac_high": high, **more}


def action_mask(exp: Experience) -> Tensor:
    """bool [T]: the action tokens of scored samples."""
    return exp.loss_mask & exp.per_token(exp.scored)


def reward_groups(exp: Experience, cfg: AlgorithmConfig) -> tuple[GroupStats, Tensor]:
    """Return the reward statistics of each sample's group, and live bool [B].

    A sample is live when it was scored and its group has scored samples that differ by more than ``cfg.zero_spread``.
    """
    return live_groups(exp.rewards, exp.scored, exp, cfg)


def live_groups(values: Tensor, valid: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[GroupStats, Tensor]:
    """Compute :func:`reward_groups` for any ``values`` [B]; those that are not ``valid`` [B] may be NaN."""
    stats = group_stats(values, exp.group_ids, valid)
    return stats, valid & (stats.size >= 2) & (stats.spread > cfg.zero_spread)


def group_scale(group: GroupStats, cfg: AlgorithmConfig) -> Tensor:
    """[B]: with ``norm_group_std`` the standard deviation of each sample's group plus ``std_eps``, else ones."""
    return group.std + cfg.std_eps if cfg.norm_group_std else torch.ones_like(group.std)


def from_outcome(exp: Experience, outcome: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T] of a shaped reward per sample.

    ``outcome`` [B] replaces ``exp.rewards`` on the last action token, then rewards are summed backwards with
    ``cfg.gamma``. Without penalties and with gamma 1 each action token gets exactly ``outcome``; with the KL in the
    reward the penalties that follow a token are added as they are, in reward units: only the outcome is normalised.
    """
    mask = action_mask(exp)
    index, valid = last_token(mask, exp.cu_seqlens)
    at, rewards = index[valid], torch.where(mask, exp.token_rewards, 0)
    rewards[at] = rewards[at] - exp.ranks.own(exp.rewards)[valid] + exp.ranks.own(outcome)[valid]
    return discounted_returns(rewards, mask, exp.cu_seqlens, cfg.gamma)
