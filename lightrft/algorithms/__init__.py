"""Advantages, policy losses and corrections; importing this package fills the registries in :mod:`.base`."""
from lightrft.algorithms import advantages, corrections, losses
from lightrft.algorithms.base import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.algorithms.catalog import table

__all__ = ["ADVANTAGES", "CORRECTIONS", "POLICY_LOSSES", "advantages", "corrections", "losses", "table"]
