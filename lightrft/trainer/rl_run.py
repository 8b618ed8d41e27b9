"""The parts of an RL run that its options ask for: tokenizer, media, prompts, models and rewards."""
from collections.abc import Callable, Mapping
from typing import Any

from lightrft.config.schema import Config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.trainer.hub_files import fetch_once
from lightrft.trainer.model_media import open_media
from lightrft.trainer.pretraining_loss import read_pretraining
from lightrft.trainer.session import Session
from lightrft.trainer.spmd_ppo_trainer import build_models, Models


def trainer_arguments(config: Config, session: Session, functions: Mapping[str, Callable[..., Any]],
                      own: Models | None = None) -> dict[str, Any]:
    """Return the arguments of :class:`~lightrft.trainer.spmd_ppo_trainer.SPMDPPOTrainer` for a run in ``session``.

    Args:
        functions: of this program, by the names under which ``--reward`` selects them.
        own: models that the program has made; the others are those that the options need.
    """
    data, strategy, limit = config.data, session.strategy, config.rollout.prompt_max_len
    path = str(config.model.pretrain)
    fetch_once(strategy, config, data)
    tokenizer = load_tokenizer(path, data.chat_template)
    media = open_media(path, tokenizer, data, strategy)
    setup = ScorerSetup.of(config, strategy.device, strategy, media)
    return {
        "config": config, "strategy": strategy, "tokenizer": tokenizer, "media": media, "timer": session.timer,
        "prompts": PromptsDataset(data, tokenizer, limit, media=media),
        "eval_prompts": PromptsDataset(data, tokenizer, limit, "eval", media) if config.held_out else [],
        "models": build_models(config, strategy, own),
        "rewards": RewardManager(config.reward, functions, setup),
        "pretraining": read_pretraining(config, tokenizer, media)
    }  # yapf: disable
