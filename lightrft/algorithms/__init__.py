"""Advantages, policy losses and corrections; importing this package fills the registries in :mod:`.base`."""
from lightrft.algorithms import (dr_grpo, gae, group_norm, none, ppo, reinforce, reinforce_baseline, reinforce_pp, rloo)
from lightrft.algorithms.base import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.algorithms.catalog import table

__all__ = [
    "ADVANTAGES", "CORRECTIONS", "POLICY_LOSSES", "table", "dr_grpo", "gae", "group_norm", "none", "ppo", "reinforce",
    "reinforce_baseline", "reinforce_pp", "rloo"
]
