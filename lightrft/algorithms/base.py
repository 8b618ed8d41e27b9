"""Registries of the algorithm suite, the contract of their entries and what outcome-based advantages share.

advantage       ``(exp, cfg) -> [T]``                    from ``token_rewards``, ``rewards``, ``values``, ``group_ids``
policy loss     ``(logprobs, exp, cfg) -> (loss [T], metrics)``, metrics with ``ratio`` and ``clip_frac_{low,high}``
correction      ``(exp, cfg) -> weights [T]``            train / rollout mismatch, detached

``exp`` is a packed :class:`lightrft.types.Experience`, ``cfg`` the :class:`lightrft.config.schema.AlgorithmConfig`.
Masking, aggregation and denominators happen once, elsewhere (:mod:`lightrft.ops.aggregate`). Metrics are ``[T]``
tensors that the caller averages over the loss mask of the whole mini-batch.

Advantages are called once per rollout with the whole batch of all ranks, so a statistic over ``exp`` is global. They
are 0 outside ``loss_mask`` and on samples that were not scored; those samples enter no statistic. ``exp.token_rewards``
holds the penalties of each action token (KL in the reward) and ``exp.rewards`` once more on the last action token.

A module's docstring is data as well: its first line and its fields ``Paper:``, ``Equation:``, ``Degenerate:`` and
``Deviation:`` make the table of algorithms (:func:`lightrft.algorithms.table`).
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.returns import discounted_returns
from lightrft.ops.segment import GroupStats, expand, group_stats, last_token
from lightrft.types import Experience
from lightrft.utils.registry import Registry

AdvantageFn = Callable[[Experience, AlgorithmConfig], Tensor]
PolicyLossFn = Callable[[Tensor, Experience, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]
SelectFn = Callable[[Tensor, Experience, AlgorithmConfig, int], Tensor]
CorrectionFn = Callable[[Experience, AlgorithmConfig], Tensor]


@dataclass(frozen=True)
class Advantage:
    """A registered estimator and what the trainer must know of it before it runs."""
    fn: AdvantageFn
    needs_group: bool = False  # refuses n_samples_per_prompt = 1
    needs_critic: bool = False
    whitens: bool = False  # already normalises over the whole rollout batch
    reads: tuple[str, ...] | None = None  # those of --lambd and --std_eps that it reads; None: not said


@dataclass(frozen=True)
class Surrogate:
    """A registered policy loss and what the trainer must know of it before it runs.

    ``selects(logprobs [T], exp, cfg, seed) -> bool [T]`` sees a whole mini-batch (all ranks and micro-batches, current
    log-probs) before its backward passes, the same on every rank; ``fn`` finds the result in ``exp.selected``.
    """
    fn: PolicyLossFn
    needs_old: bool = True  # its value depends on the policy of the rollout; False: it has no ratio
    selects: SelectFn | None = None
    reads: tuple[str, ...] | None = None  # those of config.no_effect.LOSS_OPTIONS that it reads; None: not said


ADVANTAGES: Registry[Advantage] = Registry("advantage estimator")
POLICY_LOSSES: Registry[Surrogate] = Registry("policy loss")
CORRECTIONS: Registry[CorrectionFn] = Registry("rollout correction")


def advantage(*names: str, needs_group: bool = False, needs_critic: bool = False, whitens: bool = False,
              reads: tuple[str, ...] | None = None) -> Callable[[AdvantageFn], AdvantageFn]:
    """Register an advantage estimator under ``names`` with its requirements."""

    def add(fn: AdvantageFn) -> AdvantageFn:
        ADVANTAGES.register(*names)(Advantage(fn, needs_group, needs_critic, whitens, reads))
        return fn

    return add


def policy_loss(*names: str, needs_old: bool = True, selects: SelectFn | None = None,
                reads: tuple[str, ...] | None = None) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register a policy loss under ``names`` with its requirements."""

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSSES.register(*names)(Surrogate(fn, needs_old, selects, reads))
        return fn

    return add


def action_mask(exp: Experience) -> Tensor:
    """bool [T]: the action tokens of scored samples."""
    return exp.loss_mask & expand(exp.scored, exp.cu_seqlens, exp.num_tokens)


def reward_groups(exp: Experience, cfg: AlgorithmConfig) -> tuple[GroupStats, Tensor]:
    """Reward statistics of each sample's group, and live bool [B].

    A sample is live when it was scored and its group has scored samples that differ by more than ``cfg.zero_spread``.
    """
    stats = group_stats(exp.rewards, exp.group_ids, exp.scored)
    return stats, exp.scored & (stats.size >= 2) & (stats.spread > cfg.zero_spread)


def from_outcome(exp: Experience, outcome: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Advantages [T] of a shaped reward per sample.

    ``outcome`` [B] takes the place of ``exp.rewards`` on the last action token, then rewards are summed backwards with
    ``cfg.gamma``. Without penalties and with gamma 1 each action token gets exactly ``outcome``; with the KL in the
    reward the penalties that follow a token are added as they are, in reward units: only the outcome is normalised.
    """
    mask = action_mask(exp)
    index, valid = last_token(mask, exp.cu_seqlens)
    at, rewards = index[valid], torch.where(mask, exp.token_rewards, 0)
    rewards[at] = rewards[at] - exp.rewards[valid] + outcome[valid]
    return discounted_returns(rewards, mask, exp.cu_seqlens, cfg.gamma)
