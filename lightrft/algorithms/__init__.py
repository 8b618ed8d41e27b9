"""Advantages, policy losses and corrections; importing this package fills the registries in :mod:`.base`."""
from lightrft.algorithms import (bypass, cispo, clip_cov, cpgd_advantage, cpgd_loss, dppo_kl, dppo_tv, dr_grpo, gae,
                                 gdpo, geo_mis, geo_tis, gmpo, gpg_advantage, gpg_loss, group_norm, grpo_passk, gspo,
                                 gspo_token, icepop, kl_cov, maxrl, mis, none, opo, ppo, reinforce, reinforce_baseline,
                                 reinforce_pp, remax, rloo, sapo, seq_mis, seq_tis, tis)
from lightrft.algorithms.base import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.algorithms.catalog import table

__all__ = [
    "ADVANTAGES", "CORRECTIONS", "POLICY_LOSSES", "table", "bypass", "cispo", "clip_cov", "cpgd_advantage", "cpgd_loss",
    "dppo_kl", "dppo_tv", "dr_grpo", "gae", "gdpo", "geo_mis", "geo_tis", "gmpo", "gpg_advantage", "gpg_loss",
    "group_norm", "grpo_passk", "gspo", "gspo_token", "icepop", "kl_cov", "maxrl", "mis", "none", "opo", "ppo",
    "reinforce", "reinforce_baseline", "reinforce_pp", "remax", "rloo", "sapo", "seq_mis", "seq_tis", "tis"
]
