"""The no-grad forward passes over a rollout batch, and the offload of the models while the engine generates."""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightrft.config.schema import Config
from lightrft.models.packed_model import PackedModel
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.trainer.frozen_model import FrozenModel
from lightrft.trainer.batch_plan import BatchPlan, MicroBatchLimits, plan_shares
from lightrft.trainer.shards import Shards
from lightrft.types import Experience
from lightrft.utils.progress import phase
from lightrft.utils.timer import Timer


class ModelOffloader:
    """Moves models, gradients and optimizer states off the device during generation (``--offload_during_rollout``).

    Without the option nothing moves. A repeated call does nothing.
    """

    def __init__(self, config: Config, strategy: StrategyBase, prepared: Sequence[Prepared], timer: Timer) -> None:
        self.strategy, self.timer, self.offloaded = strategy, timer, False
        self.prepared = prepared if config.rollout.offload_during_rollout else ()

    def offload(self) -> None:
        """Offload the models before generation."""
        self._move(offload=True)

    def reload(self) -> None:
        """Reload the models before a forward pass, and before their weights are read."""
        self._move(offload=False)

    def _move(self, offload: bool) -> None:
        if self.prepared and offload != self.offloaded:
            move = self.strategy.offload if offload else self.strategy.reload
            with self.timer("offload"):
                for each in self.prepared:
                    move(each)
            self.offloaded = offload


Forward = Callable[[Experience], Tensor]  # -> [T] or [K, T] of its argument


@dataclass(frozen=True)
class Pass:
    """Forward pass of one model over a rollout: ``forward`` gives a row [T] for each of the Experience's ``fields``."""
    name: str  # of its timer span
    fields: tuple[str, ...]
    forward: Forward
    during: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered around all forward passes of a rollout


def on_update_packs(config: Config) -> bool:
    """Return True if the no-grad passes run on the micro-batches (the same rows) of the first update epoch."""
    rollout = config.rollout
    return not rollout.overlap_passes and rollout.micro_rollout_batch_size in (0, config.train.micro_train_batch_size)


@torch.no_grad()
def run_passes(shards: Shards, passes: list[list[int]], model: Forward) -> Tensor:
    """Run ``model`` on the sequences of this rank's ``passes``; return [T] (or [K, T]) of the held sequences.

    A collective where the weights are sharded: ranks have equally many passes. Other held sequences get 0.
    """
    device, held = shards.strategy.device, shards.held
    taken = [shards.micro_batch(part) for part in passes]
    found = [model(exp.to(device)).float() for exp in phase(taken, "passes", "micro-batch")]
    values = torch.cat(found, -1).cpu()  # one sync for all passes
    whole = torch.zeros(*values.shape[:-1], held.num_tokens)
    for part, own in zip(passes, values.split([exp.num_tokens for exp in taken], -1)):
        if part:
            whole[..., held.tokens_of(shards.slots(part))] = own
    return whole


class LogprobPass:
    """Fills the log-probs of policy, reference and teacher, ``entropies`` and ``values`` where they are needed.

    Old log-probs are computed on the micro-batches of the first update epoch (:func:`on_update_packs`), and on the same
    rows of them (``Experience.drawn``), so on CPUs the first ratio is exactly 1. They are skipped when the rollout is
    used for a single optimizer step, whose forward pass gives the same numbers. With the correction ``bypass`` they are
    the log-probs of the engine, without a pass.

    Args:
        actor, critic, reference: prepared models; ``reference`` None with LoRA means the actor without its adapters.
        offloader: moves these models.
        teacher: rewards every token, of the policy's vocabulary.
    """

    def __init__(self, config: Config, strategy: StrategyBase, actor: Prepared, critic: Prepared | None,
                 reference: Prepared | None, offloader: ModelOffloader, teacher: FrozenModel | None = None) -> None:
        self.config, self.strategy, self.offloader = config, strategy, offloader
        self.actor, self.critic, self.reference, self.teacher = actor, critic, reference, teacher
        self.wants_entropies = config.reads_entropies
        old = ("old_logprobs", "entropies") if self.wants_entropies else ("old_logprobs", )
        self.known = [
            Pass("old_logprobs", old, self._old),
            Pass("ref", ("ref_logprobs", ), self._ref),
            Pass("teacher", ("teacher_logprobs", ), self._teach, teacher.here if teacher else nullcontext),
            Pass("values", ("values", ), lambda exp: cast(Prepared, self.critic).model(exp)[None])
        ]

    def has_features(self, key: str) -> bool:
        """True if all models have the features of the medium ``key``, so that its tensors are not needed."""
        all_models = (self.actor, self.critic, self.reference, self.teacher and self.teacher.prepared)
        models = [cast(PackedModel, each.model) for each in all_models if each]
        return all(model.modality.cache is not None and key in model.modality.cache for model in models)

    def wanted(self, num_samples: int) -> list[Pass]:
        """Return the passes over a rollout of ``num_samples`` samples."""
        names = self.config.forward_passes(num_samples, self.critic is not None)
        return [each for each in self.known if each.name in names]

    def fill(self, shards: Shards, plan: BatchPlan, timer: Timer) -> None:
        """Compute the missing fields of this rank's sequences; a collective."""
        self.offloader.reload()
        exp = shards.exp
        if self.config.bypasses:
            exp.old_logprobs = exp.rollout_logprobs
        missing = [each for each in self.wanted(shards.size) if vars(exp)[each.fields[0]] is None]
        passes = self._passes(plan) if missing else []
        for each in missing:
            with timer(each.name), each.during():
                found = run_passes(shards, passes,
                                   each.forward)[..., :exp.num_tokens]  # without a dummy that was fetched
                vars(exp).update(zip(each.fields, found))
        for frozen in (self.reference, self.teacher.prepared if self.teacher else None):
            if frozen is not None:  # the others are whole in the update all the same
                self.strategy.free_full(frozen.model)

    def _old(self, exp: Experience) -> Tensor:
        if not self.wants_entropies:
            return self._logprobs(self.actor, exp)
        return torch.stack(self.actor.model(exp, temperature=self.config.rollout.temperature, entropy=True))

    def _ref(self, exp: Experience) -> Tensor:
        with self._reference_weights():
            return self._logprobs(self.reference or self.actor, exp)

    def _teach(self, exp: Experience) -> Tensor:
        return self._logprobs(cast(FrozenModel, self.teacher).prepared, exp)

    def _reference_weights(self) -> AbstractContextManager[Any]:
        actor: Any = self.actor.model
        return actor.adapter_disabled() if self.reference is None else nullcontext()

    def _logprobs(self, prepared: Prepared, exp: Experience) -> Tensor:
        return prepared.model(exp, temperature=self.config.rollout.temperature)[0][None]

    @property
    def limits(self) -> MicroBatchLimits:
        """Limits of one pass."""
        train = self.config.train
        return MicroBatchLimits(self.config.rollout.micro_rollout_batch_size or train.micro_train_batch_size,
                                train.max_tokens_per_micro_batch)

    def _passes(self, plan: BatchPlan) -> list[list[int]]:
        if on_update_packs(self.config):
            return [micro for mini in plan.epoch(0) for micro in mini.micro_batches]
        return plan_shares(plan.owned(), plan.lens, self.limits, plan.shared)[plan.rank]
