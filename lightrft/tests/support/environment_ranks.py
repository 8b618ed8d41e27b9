"""Environments on any number of ranks, in the process of a test or by torchrun: gradients of uneven turns, and
environments that live on across steps and show pictures."""
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrft.tests.support import environments, runs
from lightrft.tests.support.invariants import whole_copy
from lightrft.trainer.batch_plan import MicroBatchLimits
from lightrft.trainer.fast_exp_maker import Rollout
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.types import Episode
from lightrft.utils.errors import UserError

HAS_VISION = find_spec("torchvision") is not None  # processors of pictures need it
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


def lived(made: SPMDPPOTrainer) -> list[Episode]:
    """Train; the responses of all steps. Each answer of ``Faulty`` has the seed of its environment and the number of
    turns that this has seen. No session outlives its response, wherever that has ended."""
    complete, seen = made.maker.complete, list[Episode]()
    made.maker.complete = lambda episodes, *rest: seen.extend(episodes) or complete(episodes, *rest)
    made.fit()
    assert not made.environment._sessions
    for episode in seen:
        answers = [message["content"].split() for message in episode.play.messages[1::2]]
        hint = episode.prompt.messages[-1]["content"].split()
        assert [words[-2:] for words in answers] == [[hint[1], str(n + 1)] for n in range(len(answers))]
    return seen


def resumed(home: Path, folder: Path) -> list[dict[str, Any]]:
    """Train two steps with ``--oversample``, and the second one again from the checkpoint of the first; what the log
    has of both second steps, with the turns that were played again for the responses of this rank."""
    lines = []
    for name in ("straight", "resumed"):
        made = ready(home, folder / name, "Faulty", runs.build, oversample=2.0, max_steps=2, max_turns=4,
                     disable_ckpt=False, save_steps=1, load_checkpoint=name == "resumed")  # yapf: disable
        seen = lived(made)
        if name == "straight" and made.strategy.is_main:
            shutil.copytree(folder / name, folder / "resumed")
            shutil.rmtree(folder / "resumed" / "checkpoints" / "step_000002")
        made.strategy.barrier()
        lines.append(runs.read_lines(folder / name / "metrics.jsonl")[-1]
                     | {"replays": sum(episode.play.replays for episode in seen)})  # yapf: disable
    return lines


def shown(home: Path, folder: Path) -> dict[str, Any]:
    """The gradient of one rollout whose environment shows pictures, and by rank the keys of these: of its own episodes,
    of the sequences that it trains, and those that it knows. The model is in ``home``."""
    from lightrft.tests.support.media_runs import options_shown
    made = ready(home, folder, "Painter", **options_shown(home))
    rollout = made.maker.make(next(made.loader), 0)
    assert (rollout.exp.rollout_logprobs - rollout.exp.old_logprobs).abs().max() < 1e-5
    gather, known = made.strategy.all_gather_object, set[str]()
    own = {one.key for episode in rollout.episodes for one in episode.play.shown}
    trained = {one.key for pictures in rollout.shards.held.shown for one in pictures}
    for key in set[str]().union(*gather(own)):
        with suppress(UserError):
            known.add(made.maker.media.media[key].key)
    found = {"keys": gather((own, trained, known)), "gradients": gradients(made, rollout)}
    made.environment.shutdown()
    made.maker.rewards.shutdown()
    return found


def main() -> None:
    """``HOME FOLDER``: measure on these ranks, and leave the result in FOLDER/found.pt."""
    home, folder = Path(sys.argv[1]), Path(sys.argv[2])
    strategy = runs.strategy_of(runs.config_of(home, folder))
    found: dict[str, Any] = measure(home, folder) | {"lines": strategy.all_gather_object(resumed(home, folder))}
    if HAS_VISION:
        found["shown"] = shown(home / "sees", folder / "shown")
    if strategy.is_main:
        torch.save(found, folder / "found.pt")
    strategy.barrier()
    strategy.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
