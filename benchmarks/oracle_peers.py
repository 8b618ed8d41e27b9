"""Formulas of verl and TRL, called with tensors: their own functions and methods, not rewritten.

Both come from the package registry without their dependencies (``make oracles``). Packages that verl imports and this
comparison never calls (ray, tensordict ...) are stubs. TRL's trainers are real except for the forward pass, generation
and the reward functions.
"""
import importlib.abc
import importlib.machinery
import sys
import types
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

STUBS = {"ray", "omegaconf", "tensordict", "hydra", "codetiming", "transfer_queue", "torchdata"}


class _Stub(types.ModuleType):
    """A module in which every name is a class."""
    __path__: list[str] = []
    __version__ = "0.10.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {
            "__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, *args, **kwargs: args and args[0],
            "__class_getitem__": classmethod(lambda cls, item: cls)
        }
        setattr(self, name, type(name, (), members))
        return vars(self)[name]


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the missing packages and makes them stubs."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top = fullname.partition(".")[0]
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if top in STUBS else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a stub has no code."""


@contextmanager
def installed(folder: Path) -> Any:
    """Make the packages in ``folder`` importable, with stubs behind them."""
    stubs = _Stubs()
    sys.path.insert(0, str(folder))
    sys.meta_path.append(stubs)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(stubs)


class Verl:
    """verl's estimators and losses on a padded batch (an ``oracles.Batch``)."""
    name = "verl"

    def __init__(self) -> None:
        import verl
        from verl.trainer.ppo import core_algos, rollout_corr_helper
        from verl.workers.config import ActorConfig
        self.version, self.config = verl.__version__, ActorConfig
        self.core, self.corrections = core_algos, rollout_corr_helper

    def token_rewards(self, batch: Any, kl: str = "", coef: float = 0.0) -> Tensor:
        """[B, L]: the reward on the last token, less the KL of every token."""
        rewards = torch.zeros_like(batch.old)
        rewards[torch.arange(len(batch.lens)), batch.last] = batch.rewards
        if kl:
            rewards = rewards - coef * self.core.kl_penalty(batch.old, batch.ref, kl) * batch.mask
        return rewards

    def advantage(self, batch: Any, name: str, kl: str = "", coef: float = 0.0, **more: Any) -> Tensor:
        """[B, L]: advantages by the estimator ``name``."""
        config = {"gamma": 1.0, **more.pop("config", {})}
        known: dict[str, Any] = {
            "token_level_rewards": self.token_rewards(batch, kl, coef), "response_mask": batch.mask.to(batch.old),
            "index": np.array(batch.groups.tolist()), "config": SimpleNamespace(get=config.get, **config), "values":
            batch.values, "gamma": 1.0, "lam": 0.95, "reward_baselines": batch.baseline, **more
        }
        fn = self.core.get_adv_estimator_fn(name)
        takes = fn.__code__.co_varnames[:fn.__code__.co_argcount]
        return fn(**{key: value for key, value in known.items() if key in takes})[0] * batch.mask

    def gdpo(self, batch: Any) -> Tensor:
        """[B, L]: advantages by gdpo, whose own function reads the parts from a dict of arrays."""
        # a prompt of one token, so that the last token of a response is at the index where the reward is read
        attention = torch.cat([torch.ones(len(batch.lens), 1).long(), batch.inside.long()], 1)
        config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": batch.part_weights.tolist()}
        parts = {key: batch.parts[:, i].numpy() for i, key in enumerate("ab")}
        return self.core.compute_gdpo_outcome_advantage(
            self.token_rewards(batch), batch.mask.to(batch.old), np.array(
                batch.groups.tolist()), config=SimpleNamespace(get=config.get), non_tensor_batch=parts,
            batch={"prompts": torch.zeros(len(batch.lens), 1), "attention_mask": attention})[0] * batch.mask

    def loss(self, batch: Any, name: str, mode: str, weights: Tensor | None = None,
             **options: Any) -> tuple[Tensor, Tensor]:
        """``(loss, gradient [B, L])`` by the policy loss ``name``."""
        own = {key: options.pop(key) for key in list(options) if key not in self.config.__dataclass_fields__}
        config = self.config(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
        config.global_batch_info.update(self._counts(batch))
        for key, value in own.items():
            object.__setattr__(config.policy_loss, key, value)
        new = batch.new.clone().requires_grad_()
        fn = self.core.get_policy_loss_fn(name)
        loss, _ = fn(batch.old, new, batch.advantages, batch.mask, mode, config, weights)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * self.core.agg_loss(batch.entropy, batch.mask.to(batch.old), mode,
                                                                    **self._counts(batch))
        return loss.detach(), torch.autograd.grad(loss, new)[0]

    @staticmethod
    def _counts(batch: Any) -> dict[str, int]:
        """Sequences of the whole mini-batch, which its trainer passes; those without a token count too."""
        return {"global_batch_size": len(batch.lens)}

    def correction(self, batch: Any, level: str, threshold: Any) -> Tensor:
        """[B, L]: weights of the train / rollout mismatch."""
        return self.corrections.compute_rollout_correction_weights(batch.old - batch.rollout, batch.mask.to(batch.old),
                                                                   level, threshold)[0]

    def kl_loss(self, batch: Any, kind: str, mode: str) -> tuple[Tensor, Tensor]:
        """``(loss, gradient [B, L])`` of the KL term alone."""
        new = batch.new.clone().requires_grad_()
        loss = self.core.agg_loss(self.core.kl_penalty(new, batch.ref, kind), batch.mask.to(batch.old), mode,
                                  **self._counts(batch))
        return loss.detach(), torch.autograd.grad(loss, new)[0]

    def value_loss(self, batch: Any, clip: float, mode: str) -> tuple[Tensor, Tensor]:
        """``(loss, gradient [B, L])`` of the critic."""
        new, mask = batch.values.clone().requires_grad_(), batch.mask.to(batch.old)
        loss = self.core.compute_value_loss(new, batch.returns, batch.old_values, mask, clip, mode,
                                            **self._counts(batch))[0]
        return loss.detach(), torch.autograd.grad(loss, new)[0]


class _Face:
    """Attributes that the methods of TRL's trainers read from ``self``."""

    def __init__(self, batch: Any, **options: Any) -> None:
        from accelerate import Accelerator
        self.batch = batch
        self.model, self.ref_model = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in "ab")
        self.accelerator, self.processing_class = Accelerator(cpu=True), None
        self._tokenizer, self.pad_to_multiple_of, self.eos_token_ids = SimpleNamespace(pad_token_id=0), None, [1]
        self.num_generations = self.num_generations_eval = batch.per_group
        self.reward_weights = options.pop("reward_weights", torch.ones(1))
        self.reward_funcs = self.reward_func_names = list("ab"[:len(self.reward_weights)])
        self._metrics = defaultdict(lambda: defaultdict(list))
        self._logs: Any = defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        self.current_gradient_accumulation_steps = 1
        self.args = SimpleNamespace(per_device_train_batch_size=len(batch.lens), steps_per_generation=1,
                                    gradient_accumulation_steps=1, gradient_checkpointing_kwargs=None,
                                    delta=options.pop("delta", None), use_bias_correction_kl=False,
                                    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
        defaults = {
            "environment_factories": None, "environments": None, "tools": None, "mask_truncated_completions": False,
            "num_iterations": 2, "use_vllm": False, "vllm_importance_sampling_correction": False, "beta": 0.0,
            "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "log_multimodal": False,
            "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
            "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": batch.mask.shape[1],
            "_entropy_bonus_enabled": options.get("entropy_coef", 0.0) > 0, "use_adaptive_entropy": False,
            "aux_loss_enabled": False, "normalize_advantages": False, "reward_clip_range": None, "_is_vlm": False,
            "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": None
        }
        vars(self).update(defaults | options)

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        ids = [[2] * (n - 1) + [1] for n in self.batch.lens.tolist()]
        masks = [row[:n].long().tolist() for row, n in zip(self.batch.mask, self.batch.lens.tolist())]
        sampled = [row[:n].tolist() for row, n in zip(self.batch.rollout, self.batch.lens.tolist())]
        if type(self).__mro__[2].__name__ == "RLOOTrainer":
            return [[3]] * len(ids), ids, [""] * len(ids)
        return [[3]] * len(ids), ids, masks, [""] * len(ids), sampled, {}, None, None

    def _calculate_rewards(self, *args: Any) -> Tensor:
        return self.batch.rewards[:, None] if len(self.reward_weights) == 1 else self.batch.parts

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, compute_entropy: bool = False,
                                           **kwargs: Any) -> tuple[Tensor, Tensor | None, None]:
        if compute_entropy:
            return self.new, self.batch.entropy + 0 * self.new, None
        return (self.batch.ref if model is self.ref_model else self.batch.old), None, None

    def scored(self) -> dict[str, Any]:
        """Advantages, masks and log-probs as TRL hands them to its loss."""
        return self._generate_and_score_completions([{"prompt": ""}] * len(self.batch.lens))

    def loss(self) -> tuple[Tensor, Tensor]:
        """``(loss, gradient [B, L])``; the advantages are the batch's."""
        inputs = self.scored() | {"advantages": self.batch.advantages[:, 0]}
        self.new = self.batch.new.clone().requires_grad_()
        loss = self._compute_loss(self.model, inputs)
        return loss.detach(), torch.autograd.grad(loss, self.new)[0]


class Trl:
    """TRL's GRPO and RLOO trainers on a padded batch (an ``oracles.Batch``)."""
    name = "TRL"

    def __init__(self) -> None:
        import trl
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.rloo_trainer import RLOOTrainer
        self.version = trl.__version__
        self.grpo = type("Grpo", (_Face, GRPOTrainer), {})
        self.rloo = type("Rloo", (_Face, RLOOTrainer), {})

    def advantage(self, batch: Any, trainer: str = "grpo", **options: Any) -> Tensor:
        """[B, L]: the advantage of each response on its tokens."""
        found = vars(self)[trainer](batch, **options).scored()["advantages"]
        return found[:, None] * batch.mask

    def loss(self, batch: Any, trainer: str = "grpo", **options: Any) -> tuple[Tensor, Tensor]:
        """``(loss, gradient [B, L])``."""
        return vars(self)[trainer](batch, **options).loss()
