"""Trainers and their parts. The public names load their home module on first use."""
from lightrft.utils.registry import lazy_exports

_HOMES = {
    "SPMDPPOTrainer": "lightrft.trainer.spmd_ppo_trainer",
    "SPMDPPOTrainerVL": "lightrft.trainer.spmd_ppo_trainer",
    "PPOTrainer": "lightrft.trainer.ppo_trainer",
    "PRMTrainer": "lightrft.trainer.offline.prm_trainer",
    "RMTrainer": "lightrft.trainer.offline.rm_trainer",
    "SFTTrainer": "lightrft.trainer.offline.sft_trainer",
    "FastExperienceMaker": "lightrft.trainer.fast_exp_maker",
    "NaiveExperienceMaker": "lightrft.trainer.fast_exp_maker",
    "get_advantage_calculator": "lightrft.trainer.advantage_calculator",
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_exports(__name__, _HOMES)
