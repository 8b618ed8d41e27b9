"""Rehearsal of a run in its dry run: the code of the run builds its models and its trainer, of names and shapes alone.

What a model folder, a checkpoint or an option of the model would refuse is refused here in the same words. No engine
starts, and no weights are read.
"""
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.inference_schema import ScoreConfig
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.schema import Config
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import flatten, options
from lightrft.datasets.media_store import MediaStore
from lightrft.environments.play import Player
from lightrft.models.config_json import read_config
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.spec import parse_models
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.planned import PlannedStrategy
from lightrft.trainer.offline.offline_trainer import OfflineTrainer
from lightrft.trainer.pretraining_loss import read_pretraining
from lightrft.trainer.rl_models import build_models, needed_models
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.types import Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.hub import is_no_model, model_is_here
from lightrft.utils.logging import silent

UNTRIED = OptimSpec(0.0)  # of a model that is only built


def models_are_here(config: Tree, elsewhere: bool) -> Generator[str, None, bool]:
    """Return True if all models that options name are on this machine; name those that are not.

    Args:
        elsewhere: the run is for another machine, so that a folder without weights is none of its own.

    Raises:
        UserError: there is no such model.
    """
    absent = [path for path in model_paths(config) if not model_is_here(path, elsewhere)]
    for path in () if elsewhere else absent:
        try:
            read_config(path)
        except UserError as error:
            if is_no_model(path, error):
                raise
    yield from (f"model: {path} is not on this machine, so its weights, and the options that depend on them, are not "
                "tried here" for path in absent)
    return not absent


def model_paths(config: Tree) -> list[str]:
    """Return the folders and hub ids of the models that options name."""
    values, known = flatten(config), options(config)
    named = [value for name, value in values.items() if known[name].path == "model" and value]
    paths = [path for value in named for path in ([value] if isinstance(value, str) else value)]
    scorers = values.get("reward_pretrain") or ScoreConfig(
        score=values.get("score") or []).as_reward_config().reward_pretrain
    return list(dict.fromkeys([*paths, *parse_models(scorers).values()]))


def rehearse_rows(config: OfflineConfig, trainer: type[OfflineTrainer[Any]], tokenizer: PreTrainedTokenizerBase | None,
                  rows: Sequence[Any], held_out: Sequence[Any], media: MediaStore | None) -> None:
    """Build the ``trainer`` of fixed data and find its checkpoint; without ``rows``, the model alone.

    Raises:
        UserError: as the run does.
    """
    strategy, model = _strategy(config), partial(trainer.load, config)
    if rows and tokenizer is not None:
        trainer(config, strategy, model, tokenizer, rows, held_out, media=media).load_newest()
    else:
        strategy.prepare(model, UNTRIED)


def rehearse_training(config: Config, tokenizer: PreTrainedTokenizerBase | None, prompts: Mapping[str,
                                                                                                  Sequence[Prompt]],
                      rewards: RewardManager, media: MediaStore | None, environment: Player | None = None) -> None:
    """Build the trainer of reinforcement learning, without an engine, and find its checkpoint; without ``prompts`` (by
    split), the models alone. A server of rewards need not run yet, so with one the rewards are not probed.

    Raises:
        UserError: as the run does.
    """
    strategy = _strategy(config)
    served = bool(config.reward.remote_rm_url or config.reward.judge_url)
    tried = replace(config, reward=replace(config.reward, reward_probe=config.reward.reward_probe and not served))
    if not prompts.get("train") or tokenizer is None:
        models = needed_models(config)
        for model, spec in ((models.actor, UNTRIED), (models.critic, UNTRIED), (models.reference, None)):
            if model is not None:
                strategy.prepare(model, spec)
        return
    with silent():  # its rows are reported already
        pretraining = read_pretraining(config, tokenizer, media)
    SPMDPPOTrainer(tried, strategy, build_models(config,
                                                 strategy), tokenizer, prompts["train"], prompts.get("eval", ()),
                   rewards=rewards, media=media, pretraining=pretraining, environment=environment).load_newest()


def _strategy(config: Config | OfflineConfig) -> PlannedStrategy:
    return PlannedStrategy(config.strategy, bool(config.model.bf16))
