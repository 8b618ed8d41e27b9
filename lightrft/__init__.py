"""lightrft: reinforcement fine-tuning of language and vision-language models, from one CPU to a cluster.

Importing this package loads nothing heavy: the public names below load their home module on first use.
"""
from lightrft.utils.registry import lazy_exports

__version__ = "0.1.0"

_HOMES = {
    "lightrft.algorithms": ("ADVANTAGES", "CORRECTIONS", "POLICY_LOSSES"),
    "lightrft.algorithms.base": ("advantage", ),
    "lightrft.api": ("DPO", "GRM", "GRPO", "KD", "KTO", "PRM", "RL", "RM", "SFT"),
    "lightrft.config.cli": ("parse_config", ),
    "lightrft.config.schema": ("Config", "StrategyConfig"),
    "lightrft.datasets.prompts_dataset": ("PromptDatasetVL", "PromptsDataset"),
    "lightrft.models.actor_language": ("ActorAL", "ActorLanguage", "ActorVL"),
    "lightrft.models.loader": ("load_actor", "load_critic", "load_process_reward_model", "load_reward_model"),
    "lightrft.models.loss": ("GPTLMLoss", "PolicyLoss", "ValueLoss"),
    "lightrft.models.tokenizer": ("load_tokenizer", ),
    "lightrft.rewards.base": ("REWARDS", "ResponseFault", "RewardInput"),
    "lightrft.rewards.manager": ("RewardManager", ),
    "lightrft.rollout.engines": ("get_engine", ),
    "lightrft.strategy.strategy": ("get_strategy", ),
    "lightrft.trainer.offline.dpo_trainer": ("DPOTrainer", ),
    "lightrft.trainer.offline.kd_trainer": ("KDTrainer", ),
    "lightrft.trainer.offline.kto_trainer": ("KTOTrainer", ),
    "lightrft.trainer.offline.prm_trainer": ("PRMTrainer", ),
    "lightrft.trainer.offline.rm_trainer": ("RMTrainer", ),
    "lightrft.trainer.offline.sft_trainer": ("SFTTrainer", ),
    "lightrft.trainer.spmd_ppo_trainer": ("SPMDPPOTrainer", ),
    "lightrft.types": ("Experience", "Prompt", "Sample"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULE_OF)
__getattr__ = lazy_exports(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
