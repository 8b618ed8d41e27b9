"""Trainer weights -> engine."""
import time

from lightrft.rollout.engine import RolloutEngine
from lightrft.strategy.strategy_base import Prepared, StrategyBase


def sync_weights(strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, version: int,
                 bucket_mib: int = 512) -> float:
    """Stream the full weights of ``prepared.model`` into ``engine``, ``bucket_mib`` MiB at a time; seconds taken.

    A collective when the model is sharded: every rank calls it, and each fills its own engine.
    """
    start = time.perf_counter()
    engine.update_weights(strategy.full_params(prepared.model, bucket_mib << 20), version)
    return time.perf_counter() - start
