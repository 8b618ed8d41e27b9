"""Gradients of uneven turns on any number of ranks; test_environment_ranks runs it in its process or by torchrun."""
import sys
from pathlib import Path

import torch
from torch import Tensor

from lightrft.tests.support import environments, runs
from lightrft.tests.support.invariants import whole_copy
from lightrft.trainer.batch_plan import MicroBatchLimits
from lightrft.trainer.fast_exp_maker import Rollout
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

CUTS = {"whole": (8, 10**6), "alone": (1, 10**6), "token budget": (0, 260)}  # samples and tokens of a micro-batch


def ready(home: Path, folder: Path, name: str, make=runs.ready, **options) -> SPMDPPOTrainer:
    """A trainer with the environment ``name`` of :mod:`environments`; ``make`` builds it, and gives its engine the
    weights."""
    return make(home, folder, environment=f"{environments.__file__}:{name}",
                **{"generate_max_len": 150, "prompt_max_len": 96, "reward": ["environment"]} | options)  # yapf: disable


def gradients(made: SPMDPPOTrainer, rollout: Rollout, rows: int = 8, tokens: int = 10**6) -> dict[str, Tensor]:
    """The whole gradient of the policy on ``rollout``, in micro-batches of ``rows`` and ``tokens``; no step is made."""
    found: dict[str, Tensor] = {}

    def keep(prepared, max_norm):
        found.update((key, whole_copy(weight.grad)) for key, weight in prepared.model.named_parameters())
        made.strategy.discard_gradients(prepared)
        return 1.0

    made.maker.limits, step = MicroBatchLimits(rows, tokens), made.strategy.optimizer_step
    rollout.plan, made.strategy.optimizer_step = made.maker.plan(rollout.shards, 0), keep
    made.update.run(rollout, 0, 0.0)
    made.strategy.optimizer_step = step
    return found


def measure(home: Path, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Gradients of one rollout under each cut, and the turns of its responses."""
    made = ready(home, folder, "Uneven", advantage_estimator="reinforce")
    rollout = made.maker.make(next(made.loader), 0)
    turns = [len(episode.play.rewards) for episode in rollout.episodes]
    found = {cut: gradients(made, rollout, *limits) for cut, limits in CUTS.items()}
    found["turns"] = dict(enumerate(made.strategy.all_gather_object(turns)))
    made.environment.shutdown()
    made.maker.rewards.shutdown()
    return found


def main() -> None:
    """``HOME FOLDER``: measure on these ranks, and leave the result in FOLDER/found.pt."""
    home, folder = Path(sys.argv[1]), Path(sys.argv[2])
    strategy = runs.strategy_of(runs.config_of(home, folder))
    found = measure(home, folder)
    if strategy.is_main:
        torch.save(found, folder / "found.pt")
    strategy.barrier()
    strategy.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
