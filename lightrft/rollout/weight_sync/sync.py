"""Transfer of the trainer's weights to the engine."""
import time

from lightrft.rollout.engine import RolloutEngine, TakesAdapters
from lightrft.rollout.weight_sync.verify import WeightSyncVerifier
from lightrft.strategy.base import Prepared, StrategyBase


def sync_weights(strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, version: int, bucket_mib: int = 512,
                 proof: WeightSyncVerifier | None = None) -> float:
    """Stream the full weights of ``prepared.model`` into ``engine``, ``bucket_mib`` MiB at a time; return the
    seconds taken. An engine that takes adapters gets the base weights once.

    A collective when the model is sharded: every rank calls it, and each fills its own engine. With ``proof`` the
    stream is observed; :meth:`WeightSyncVerifier.check` then verifies the engine.
    """
    start = time.perf_counter()
    lora = engine.lora if isinstance(engine, TakesAdapters) else "merged"
    stream = strategy.full_params(prepared.model, bucket_mib << 20, lora)
    engine.update_weights(proof.watch(stream) if proof else stream, version)
    return time.perf_counter() - start
