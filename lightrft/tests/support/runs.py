"""Tiny real runs of the trainer in this process, for tests: model, data, options -> ``fit()`` -> what it left."""
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.cli import parse_config
from lightrft.config.schema import Config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.tokenizer import load_tokenizer
from lightrft.preflight.validate import validate
from lightrft.rewards.base import JudgedRow, Outcome, RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.spec import RewardPart
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import tiny
from lightrft.trainer import run_log
from lightrft.trainer.model_media import open_media
from lightrft.trainer.pretraining_loss import read_pretraining
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, build_models
from lightrft.utils.env import World, rare_garbage_collection, seed_everything

BASE: dict[str, Any] = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "prompt_max_len": 32,
    "generate_max_len": 12,
    "stop": list("abcdefghijklmnopqrstuvwxyz"),
    "max_steps": 1,
    "engine_kv_mib": 1,
    "actor_learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
    "reward_probe": False,
    "self_test": False,
    "sync_proof": "fingerprint",
    "disable_ckpt": True,
    "eval_steps": 0,
}
PROMPTS = ("one", "two plus two", "3+4=", "the fifth of many", "6?", "seven is odd")


@pytest.fixture(scope="module", autouse=True)
def no_picture() -> Iterator[None]:
    """For modules of many runs, which take it up by name: without curves, and without a visit of all objects per run.

    Each of the two takes longer than a run.
    """
    with pytest.MonkeyPatch.context() as patch, rare_garbage_collection():
        patch.setattr(run_log, "plot_curve", lambda *args: None)
        yield


def letters(item: RewardInput) -> Outcome:
    """A number in [0, 1) that depends on every character of the response and on nothing else."""
    return Outcome(sum((i + 1) * ord(letter) for i, letter in enumerate(item.response)) % 11 / 11)


class Judge(RewardManager):
    """The real manager with one part that is decided in this process."""

    def __init__(self, cfg: Any, score: Callable[[RewardInput], Outcome] = letters) -> None:
        super().__init__(cfg)
        self.part = RewardPart("judge", fast=score)

    def parts_of(self, item: JudgedRow) -> list[tuple[RewardPart, float]]:
        """One part for every row."""
        return [(self.part, 1.0)]

    def part_names(self) -> set[str]:
        """The name of this part."""
        return {self.part.name}


def write_home(folder: Path) -> Path:
    """A one-layer model and its tokenizer in ``folder/model``, prompts in ``folder/{train,test}.jsonl``; returns it."""
    tiny.save_model(folder / "model", num_hidden_layers=1, initializer_range=0.5)
    rows = [{"prompt": text, "reference": str(i), "data_source": "even" if i % 2 == 0 else "odd"}
            for i, text in enumerate(PROMPTS)]  # yapf: disable
    for name, part in (("train", rows), ("test", rows[:4])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return folder


def config_of(home: Path, save: Path, /, **options: Any) -> Config:
    """The checked options of a run: :data:`BASE`, the paths, then ``options`` (flag names)."""
    values = {**BASE, "pretrain": str(home / "model"), "prompt_data": [str(home / "train.jsonl")], **options}
    values["save_path"] = str(save)
    values["pretrain_data"] = [str(home / name) for name in options.get("pretrain_data", ())]
    if values.get("advantage_estimator") == "gae":
        values.setdefault("critic_learning_rate", 1e-3)
    config = parse_config([], defaults=values).config
    validate(config, World.from_env().world_size)
    return config


def strategy_of(config: Config) -> StrategyBase:
    """The strategy of ``config``, set up."""
    strategy = get_strategy(config.strategy, bf16=bool(config.model.bf16))
    strategy.setup()
    return strategy


def trainer_of(config: Config, strategy: StrategyBase, rewards: RewardManager | None = None) -> SPMDPPOTrainer:
    """The trainer exactly as ``lightrft.cli.train`` builds it; rewards by :func:`letters` unless given or asked for."""
    seed_everything(config.train.seed + strategy.rank)
    tokenizer = load_tokenizer(config.model.pretrain, config.data.chat_template)
    limit, media = config.rollout.prompt_max_len, open_media(config.model.pretrain, tokenizer, config.data)
    prompts = PromptsDataset(config.data, tokenizer, limit, media=media)
    held_out = PromptsDataset(config.data, tokenizer, limit, "eval", media) if config.held_out else []
    asked = config.reward.reward or config.reward.remote_rm_url or config.reward.reward_pretrain
    if rewards is None and not asked:
        rewards = Judge(config.reward)
    return SPMDPPOTrainer(config, strategy, build_models(config, strategy), tokenizer, prompts, held_out,
                          rewards=rewards, media=media, pretraining=read_pretraining(config, tokenizer, media))


def build(home: Path, save: Path, /, score: Callable[[RewardInput], Outcome] | None = None,
          **options: Any) -> SPMDPPOTrainer:
    """The trainer of a run; ``score``, if given, decides its rewards."""
    config = config_of(home, save, **options)
    return trainer_of(config, strategy_of(config), Judge(config.reward, score) if score else None)


def ready(home: Path, save: Path, /, score: Callable[[RewardInput], Outcome] | None = None,
          **options: Any) -> SPMDPPOTrainer:
    """As :func:`build`, before a rollout: the engine has its weights."""
    trainer = build(home, save, score, **options)
    trainer.sync_weights(0)
    trainer.prepared["actor"].model.eval()
    return trainer


@dataclass
class Run:
    """A run that is over."""
    trainer: SPMDPPOTrainer
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of ``metrics.jsonl``."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def metrics(self) -> dict[str, Any]:
        """The last line."""
        return self.lines[-1]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Full weights of the policy by HF name."""
        return weights(self.trainer, "actor")

    def rollout(self, step: int) -> list[dict[str, Any]]:
        """The saved samples of a step."""
        return read_lines(self.folder / "rollouts" / f"step_{step}.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights(trainer: SPMDPPOTrainer, name: str) -> dict[str, torch.Tensor]:
    """Copies of the full weights of a model of ``trainer`` (a collective)."""
    stream = trainer.strategy.full_params(trainer.prepared[name].model)
    return {key: value.detach().cpu().clone() for key, value in stream}


def run(home: Path, save: Path, /, rewards: RewardManager | None = None, **options: Any) -> Run:
    """One run to its end."""
    config = config_of(home, save, **options)
    trainer = trainer_of(config, strategy_of(config), rewards)
    trainer.fit()
    return Run(trainer, save)
