"""The optimizer steps of one rollout: epochs x mini-batches x micro-batches, for the policy and the critic.

One global loss per mini-batch: its denominators count the kept tokens and sequences of *all* ranks and micro-batches,
so the gradient does not depend on how the batch is cut.
"""
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from lightrft.algorithms.base import POLICY_LOSSES
from lightrft.config.schema import Config
from lightrft.models.loss import PolicyLoss, ValueLoss
from lightrft.ops.aggregate import Denominators
from lightrft.ops.divergence import mismatch_metrics, mismatch_sums
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.trainer.fast_exp_maker import Rollout
from lightrft.trainer.load_balance import LoadBalance
from lightrft.trainer.logprob_pass import run_passes
from lightrft.trainer.metric_sums import MetricSums
from lightrft.trainer.optimizer_step import OptimizerStep, step_metrics, StepResult
from lightrft.trainer.pretraining_loss import PretrainingLoss
from lightrft.trainer.batch_plan import gathered, MiniBatch
from lightrft.trainer.checks.first_step import add_gaps, FIRST_KL, FIRST_RATIO, pass_metrics, SamePolicy
from lightrft.trainer.samples import sample_seed
from lightrft.trainer.shards import BatchRanks, Shards
from lightrft.trainer.checks.gradient_invariance import SelfTest
from lightrft.types import Experience
from lightrft.utils.timer import Timer

Coefs = tuple[float, float | None]  # coefficients of the KL and the entropy bonus


class PolicyUpdate:
    """Trains the actor (and the critic) on one rollout after another."""

    def __init__(self, config: Config, strategy: StrategyBase, actor: Prepared, critic: Prepared | None, timer: Timer,
                 pretraining: PretrainingLoss | None = None) -> None:
        self.config, self.strategy, self.actor, self.critic = config, strategy, actor, critic
        self.pretraining, coef = pretraining, config.train.aux_loss_coef
        self.balance = LoadBalance(coef, strategy, actor) if coef else None
        algorithm = config.algorithm
        self.norm = float(algorithm.loss_agg_norm or config.rollout.generate_max_len)
        self.policy_loss, self.value_loss = PolicyLoss(algorithm, self.norm), ValueLoss(algorithm.value_clip)
        self.same_policy, self.nonzero_advantage = SamePolicy(config), NonzeroAdvantage(config)
        self.selection, self.timer = TokenSelection(config, strategy, actor), timer
        self.steps = {
            name: OptimizerStep(config.train, strategy, timer)
            for name, prepared in (("policy", actor), ("critic", critic)) if prepared is not None
        }
        self.self_test = SelfTest(config, strategy, self.steps)

    def limit_responses(self, max_len: int) -> None:
        """Limit responses to ``max_len`` tokens from now on; it is the default constant of seq-mean-token-sum-norm."""
        self.norm = self.policy_loss.norm = float(self.config.algorithm.loss_agg_norm or max_len)

    def run(self, rollout: Rollout, step: int, kl_coef: float, entropy_coef: float | None = None) -> dict[str, float]:
        """Make all optimizer steps on ``rollout``; return ``policy/*``, ``critic/*`` and ``rollout/mismatch/*``.

        The coefficients are those of this step (entropy: default ``--entropy_coef``).
        """
        coefs = kl_coef, entropy_coef
        self.same_policy.version = step
        train_actor = step >= self.config.train.freezing_actor_steps
        if self.self_test.due:
            with self.timer("self_test"):
                self._self_test(rollout, coefs, train_actor)
        live = self.nonzero_advantage(rollout.shards)
        sums, results, forwarded = self._epochs(rollout, coefs, train_actor, live)
        self._compare_all(sums, rollout)
        sums.reduce(self.strategy)
        return self._metrics(sums, results, rollout.shards, live) | {"perf/forward_tokens": forwarded}

    def _self_test(self, rollout: Rollout, coefs: Coefs, train_actor: bool) -> None:
        """Check that the gradients do not depend on the cut, without side effects."""
        models = {name: self._prepared(name) for name in self.steps if train_actor or name == "critic"}

        def losses_of(denominators: Denominators) -> dict[str, Callable[[Experience], Tensor]]:
            return {"policy": self._policy_loss(MetricSums(), denominators, coefs, False),
                    "critic": self._value_loss(MetricSums(), denominators)}  # yapf: disable

        self.self_test.run(rollout.shards, rollout.plan, self.norm, models, losses_of)

    def _compare_engine(self, sums: MetricSums, exp: Experience) -> None:
        """Add the mismatch between the old log-probs of ``exp`` and those of the engine."""
        totals, peaks = mismatch_sums(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
        sums.add_vector("mismatch", totals)
        sums.peak("mismatch_peaks", peaks)
        self.same_policy.add(sums, exp)

    def _compare_all(self, sums: MetricSums, rollout: Rollout) -> None:
        """Add the mismatch of all samples if a pass ran before the update; else the first optimizer step adds it."""
        if rollout.exp.old_logprobs is None or self.config.bypasses:
            return
        for mini in rollout.plan.epoch(0):
            for part in mini.micro_batches:
                self._compare_engine(sums, rollout.shards.micro_batch(part))

    def _mismatch(self, sums: MetricSums) -> dict[str, float]:
        """Return ``rollout/mismatch/*``; only the number of tokens if it is 0."""
        if "mismatch_peaks" not in sums.peaks() or not sums.vector("mismatch")[0]:
            return {"rollout/mismatch/tokens": 0}
        found = mismatch_metrics(sums.vector("mismatch"), sums.vector("mismatch_peaks"))
        return {f"rollout/mismatch/{key}": value for key, value in found.items()} | self.same_policy.metrics(sums)

    def _epochs(self, rollout: Rollout, coefs: Coefs, train_actor: bool,
                live: Tensor) -> tuple[MetricSums, dict[str, list[StepResult]], int]:
        sums, forwarded = MetricSums(), 0
        results: dict[str, list[StepResult]] = {"policy": [], "critic": []}
        shards, data = rollout.shards, self.strategy.mesh.data
        for epoch in range(self.config.train.max_epochs):
            minis = rollout.plan.epoch(epoch)
            live_plans = [mini.of(live) for mini in minis]
            plans = live_plans if train_actor else []
            forwarded += sum(map(rollout.plan.tokens, plans))
            if self.critic is not None or train_actor and self.selection.selects is not None:
                plans = plans + [mini.plan for mini in minis]
            shards.fetch(gathered(plans, data.size))
            for number, (mini, live_plan) in enumerate(zip(minis, live_plans)):
                denominators = mini.denominators(shards.kept, self.norm, self.config.algorithm.loss_agg_all_seqs)
                losses = {}
                if train_actor:
                    with self.timer("forward"):
                        seed = sample_seed(rollout.plan.seed, epoch, number)
                        self.selection.mark(shards, mini, seed, fresh=not results["policy"])
                    losses["policy"] = self._policy_loss(sums, denominators, coefs, not results["policy"])
                if self.critic is not None:
                    losses["critic"] = self._value_loss(sums, denominators)
                extra = self.pretraining.draw(self.actor, sums) if train_actor and self.pretraining else None
                forwarded += extra.tokens if extra else 0
                if train_actor and self.balance:
                    losses["policy"] = self._balanced(losses["policy"], self.balance, sums)
                    with self.timer("forward"):
                        self.balance.measure(shards.micro_batch, live_plan[data.index])
                for name, loss_of in losses.items():
                    own = name == "policy"
                    passes = live_plan[data.index] if own else mini.micro_batches
                    results[name].append(self.steps[name].run(self._prepared(name), shards.micro_batch, passes,
                                                              denominators.tokens, loss_of, extra if own else None))
        return sums, results, forwarded

    def _prepared(self, name: str) -> Prepared:
        return self.actor if name == "policy" else cast(Prepared, self.critic)

    def _policy_loss(self, sums: MetricSums, denominators: Denominators, coefs: Coefs,
                     first_step: bool) -> Callable[[Experience], Tensor]:
        """Return the loss function of a micro-batch, which also collects its metrics."""

        def loss_of(exp: Experience) -> Tensor:
            logprobs, entropy = self.actor.model(exp, temperature=self.config.rollout.temperature, entropy=True)
            if first_step and (exp.old_logprobs is None or self.config.bypasses):
                self._compare_engine(sums, replace(exp, old_logprobs=logprobs.detach()))
            loss, metrics = self.policy_loss(logprobs, entropy, exp, denominators, *coefs)
            sums.add_tokens({f"policy/{key}": value for key, value in metrics.items()}, exp.loss_mask)
            sums.peak("policy/ratio_max", _peak(metrics["ratio"], exp.loss_mask))
            if first_step:
                add_gaps(sums, FIRST_RATIO, metrics["ratio"] - 1, exp.loss_mask)
                if exp.ref_logprobs is not None:
                    add_gaps(sums, FIRST_KL, logprobs - exp.ref_logprobs, exp.loss_mask)
            return loss

        return loss_of

    def _balanced(self, loss_of: Callable[[Experience], Tensor], balance: LoadBalance,
                  sums: MetricSums) -> Callable[[Experience], Tensor]:
        """Return ``loss_of`` with the share of the load-balancing loss."""
        return lambda exp: loss_of(exp) + balance.share(sums, "policy/aux_loss")

    def _value_loss(self, sums: MetricSums, denominators: Denominators) -> Callable[[Experience], Tensor]:

        def loss_of(exp: Experience) -> Tensor:
            values = self._prepared("critic").model(exp)
            loss, metrics = self.value_loss(values, exp, denominators)
            error = exp.returns - exp.values
            moments = {
                "value_mean": values, "returns": exp.returns, "returns_sq": exp.returns**2, "error": error, "error_sq":
                error**2
            }
            sums.add_tokens({f"critic/{key}": value for key, value in (metrics | moments).items()}, exp.loss_mask)
            return loss

        return loss_of

    def _metrics(self, sums: MetricSums, results: dict[str, list[StepResult]], shards: Shards,
                 live: Tensor) -> dict[str, float]:
        metrics = self._mismatch(sums)
        if results["policy"]:
            metrics["rollout/dropped_samples"] = (~live).sum().item()
        if results["policy"] and live.any():
            metrics |= {key: sums.mean(key) for key in sums.keys() if key.startswith("policy/")}
            metrics |= {key: sums.vector(key).item() for key in sums.peaks() if key.startswith("policy/")}
            metrics |= pass_metrics(sums)
        if results["critic"]:
            metrics |= _critic_metrics(sums)
        trained = shards.lens[live].sum().item() * self.config.train.max_epochs
        metrics["policy/trained_tokens"] = trained * bool(results["policy"])
        for name, steps in results.items():
            metrics |= step_metrics(name, steps) if steps else {}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the bad steps in a row of every model, and the position in the pretraining data."""
        position = {"pretraining": self.pretraining.loader.state_dict()} if self.pretraining else {}
        return {name: step.bad_in_a_row for name, step in self.steps.items()} | position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; pretraining data that are new start at their beginning."""
        for name, step in self.steps.items():
            step.bad_in_a_row = state[name]
        if self.pretraining and "pretraining" in state:
            self.pretraining.loader.load_state_dict(state["pretraining"])


def _critic_metrics(sums: MetricSums) -> dict[str, float]:
    """Return means, and explained variance = 1 - Var[returns - values] / Var[returns], values before the update."""
    mean = {key: sums.mean(f"critic/{key}") for key in ("returns", "returns_sq", "error", "error_sq")}
    variance = mean["returns_sq"] - mean["returns"]**2
    explained = 1 - (mean["error_sq"] - mean["error"]**2) / variance if variance > 1e-12 else 0.0
    return {
        "critic/value_mean": sums.mean("critic/value_mean"), "critic/clip_frac": sums.mean("critic/clip_frac"),
        "critic/explained_variance": explained
    }


def _peak(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0.0).max()


class NonzeroAdvantage:
    """Selects all samples, or only those with an advantage when the others would add exactly 0 to the gradient.

    The others add more with a KL or an entropy bonus in the loss (the adaptive bonus needs every sample's entropy),
    and with a policy loss that has a gradient where the advantage is 0, or that selects tokens among all of them.
    """

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        regularised = (algorithm.use_kl_loss or algorithm.entropy_coef or algorithm.entropy_target is not None
                       or config.train.aux_loss_coef)  # yapf: disable
        entry = POLICY_LOSSES.get(algorithm.policy_loss)
        self.drops = config.train.drop_zero_advantage and entry.skips_zero and not regularised and not entry.selects

    def __call__(self, shards: Shards) -> Tensor:
        """bool [B]: the samples of all ranks to train on."""
        if not self.drops:
            return torch.ones(shards.size, dtype=torch.bool)
        return shards.live > 0


class TokenSelection:
    """Sets ``selected`` of the held sequences by statistics over the mini-batch of all ranks, for losses that select
    tokens.

    The result does not depend on the cut into micro-batches, nor on the number of ranks.
    """

    def __init__(self, config: Config, strategy: StrategyBase, actor: Prepared) -> None:
        self.config, self.strategy, self.actor = config, strategy, actor
        self.selects = POLICY_LOSSES.get(config.algorithm.policy_loss).selects

    def mark(self, shards: Shards, mini: MiniBatch, seed: int, fresh: bool) -> None:
        """Select tokens of ``mini``, a collective; do nothing for a loss that selects none.

        Args:
            seed: seed of the selection, the same on every rank.
            fresh: True while the policy is the one of the rollout, so that the old log-probs are the current ones.
        """
        if self.selects is None:
            return
        held, own = shards.held, sorted(sample for part in mini.micro_batches for sample in part)
        known = fresh and held.old_logprobs is not None and not self.config.bypasses
        logprobs = held.old_logprobs if known else self._current(shards, mini)
        slots = shards.slots(own)
        tokens = held.tokens_of(slots)
        index, share = torch.tensor(own, dtype=torch.long), self.strategy.mesh.data
        ranks = BatchRanks(self.strategy, index, shards.size, share)
        batch = replace(held.select(slots), ranks=ranks)
        held.selected = torch.zeros(held.num_tokens, dtype=torch.bool)
        held.selected[tokens] = self.selects(logprobs[tokens], batch, self.config.algorithm, seed)

    def _current(self, shards: Shards, mini: MiniBatch) -> Tensor:
        """Return log-probs [T] of the current policy, 0 outside ``mini``."""
        model = self.actor.model
        model.eval()
        temperature = self.config.rollout.temperature
        return run_passes(shards, mini.micro_batches, lambda e: model(e, temperature=temperature)[0])
