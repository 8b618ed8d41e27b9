"""Rollout engines and weight sync. The public names load their home module on first use."""
from lightrft.utils.registry import lazy_exports

_HOMES = {
    "generate": "lightrft.rollout.scheduler",
    "RolloutEngine": "lightrft.rollout.engine",
    "SamplingParams": "lightrft.rollout.engine",
    "get_engine": "lightrft.rollout.engines",
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_exports(__name__, _HOMES)
