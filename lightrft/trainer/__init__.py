"""Trainers and what they are made of. The public names load their home module on first use."""
from importlib import import_module
from typing import Any

_HOMES = {
    "SPMDPPOTrainer": "lightrft.trainer.spmd_ppo_trainer",
    "SPMDPPOTrainerVL": "lightrft.trainer.spmd_ppo_trainer",
    "PPOTrainer": "lightrft.trainer.ppo_trainer",
    "SFTTrainer": "lightrft.trainer.sft_trainer",
    "FastExperienceMaker": "lightrft.trainer.fast_exp_maker",
    "NaiveExperienceMaker": "lightrft.trainer.fast_exp_maker",
    "get_advantage_calculator": "lightrft.trainer.advantage_calculator",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightrft.trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
