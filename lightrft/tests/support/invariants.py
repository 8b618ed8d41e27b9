"""Measurements of a run on any number of ranks; test_invariants starts them in its process or by torchrun."""
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrft.tests.support import runs
from lightrft.tests.support.sharded import full
from lightrft.trainer.fast_exp_maker import Rollout
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.types import Experience

LONG = 4  # steps of a whole run
SHAPE = {"n_samples_per_prompt": 2, "generate_max_len": 8, "micro_train_batch_size": 3}
SPREAD: dict[str, dict[str, Any]] = {
    "group_norm": {},
    "gae": {"advantage_estimator": "gae", "init_kl_coef": 0.1, "rollout_batch_size": 5, "train_batch_size": 5,
            "micro_train_batch_size": 1, "pretrain_data": ["train.jsonl"], "ptx_batch_size": 3,
            "teacher_model": "{home}/other", "kd_coef": 0.1, "kd_gamma": 0.5},
    # five samples and three rows on two or four ranks: some pad with an empty micro-batch
    "kl loss": {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_target": 0.01, "kl_horizon": 100,
                "reward_running_norm": True, "entropy_coef": 0.01, "loss_agg_mode": "seq-mean-token-mean",
                "mask_truncated": True, "generate_max_len": 5},  # passes see tokens that then leave the loss
    "entropy": {"entropy_target": 50.0, "entropy_coef": 0.01, "entropy_step": 0.01, "entropy_coef_max": 0.1,
                "high_entropy_token_ratio": 0.3, "rollout_correction": "seq_tis", "correction_veto": 0.5},
    "clip_cov": {"policy_loss": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_low": 0.1, "train_batch_size": 4,
                 "max_epochs": 2},  # chooses tokens from the whole mini-batch
}  # yapf: disable


def whole_copy(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, wherever its parts lie (a collective)."""
    return full(tensor).detach().cpu().clone()


def build(home: Path, folder: Path, **options: Any) -> SPMDPPOTrainer:
    """A trainer whose engine has its weights."""
    return runs.ready(home, folder, **SHAPE | options)


def make_rollout(trainer: SPMDPPOTrainer) -> Rollout:
    """The first rollout of a run."""
    trainer.prepared["actor"].model.eval()
    return trainer.maker.make(next(trainer.loader), 0, trainer.kl.value)


def gradients(trainer: SPMDPPOTrainer, rollout: Rollout) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Update on ``rollout``; returns its metrics, without those of speed, and the whole gradient of the first optimizer
    step of each model."""
    strategy, found = trainer.strategy, {}
    original = strategy.optimizer_step

    def spy(prepared, max_norm):
        name = next(name for name, each in trainer.prepared.items() if each is prepared)
        for key, parameter in prepared.model.named_parameters():
            if f"{name}/{key}" not in found:
                found[f"{name}/{key}"] = whole_copy(parameter.grad)
        return original(prepared, max_norm)

    strategy.optimizer_step = spy
    metrics = trainer.update.run(rollout, 0, trainer.kl.value)
    strategy.optimizer_step = original
    return {key: value for key, value in metrics.items() if not key.startswith("perf/")}, found


def updated(trainer: SPMDPPOTrainer) -> dict[str, Tensor]:
    """The weights of every trained model."""
    return {f"{name}/{key}": value for name in trainer.prepared for key, value in runs.weights(trainer, name).items()}


def largest_gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference of any element, relative to the largest element of all."""
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    scale = max(value.abs().max().item() for value in second.values())
    return max((first[name] - value).abs().max().item() for name, value in second.items()) / scale


def plain(exp: Experience) -> dict[str, Tensor]:
    """Every tensor that is set."""
    return {f.name: value for f in fields(exp) if isinstance(value := exp.__dict__[f.name], Tensor)}


def facts(home: Path, folder: Path, options: dict[str, Any], run: bool) -> dict[str, Any]:
    """Measure what is the same on any number of ranks: the first rollout, its gradients, the weights after its update,
    and what a whole run of ``LONG`` steps leaves."""
    options = {name: value.format(home=home) if name == "teacher_model" else value for name, value in options.items()}
    trainer = build(home, folder / "parts", **options)
    rollout = make_rollout(trainer)
    whole = plain(rollout.shards.collect(list(range(rollout.shards.size))))
    metrics, grads = gradients(trainer, rollout)
    trainer.maker.rewards.shutdown()
    found = {"exp": whole, "metrics": metrics, "grads": grads, "weights": updated(trainer), "held":
             (rollout.exp.num_seqs, rollout.shards.size)}  # yapf: disable
    if run:
        done = runs.run(home, folder / "run", max_steps=LONG, save_trajectories=True, **(SHAPE | options))
        done.trainer.strategy.barrier()
        found["run"] = {"weights": updated(done.trainer), "lines": done.lines, "rollouts":
                        [done.rollout(step) for step in (1, LONG)]}  # yapf: disable
    return found


def skipping(home: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """An on-policy update with the old log-prob pass left out, and with the pass forced."""
    found = {}
    for name, forced in (("skipped", False), ("forced", True)):
        trainer = build(home, folder, init_kl_coef=0.1, use_kl_loss=True)
        if forced:
            passes = trainer.maker.logprobs
            every = [each for each in passes.known if each.name in ("old_logprobs", "ref")]
            passes.wanted = lambda num_samples, every=every: every
        rollout = make_rollout(trainer)
        metrics, grads = gradients(trainer, rollout)
        found[name] = {"ran": rollout.exp.old_logprobs is not None, "metrics": metrics, "grads": grads,
                       "weights": updated(trainer)}  # yapf: disable
    return found


def measure(home: Path, folder: Path, run: bool = True) -> dict[str, Any]:
    """All facts of this world size; ``run``: whole runs too, and passes that are left out."""
    found = {name: facts(home, folder / name.replace(" ", "_"), options, run) for name, options in SPREAD.items()}
    return {**found, "skipping": skipping(home, folder / "skipping") if run else {}}


def main() -> None:
    """``HOME FOLDER [run]``: measure and leave the facts in FOLDER/facts.pt."""
    home, folder = Path(sys.argv[1]), Path(sys.argv[2])
    cfg = runs.config_of(home, folder)
    strategy = runs.strategy_of(cfg)
    found = measure(home, folder, "run" in sys.argv)
    if strategy.is_main:
        torch.save(found, folder / "facts.pt")
    strategy.barrier()
    strategy.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
