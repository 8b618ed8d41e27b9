"""Rollout engines and the way weights reach them."""
from lightrft.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from lightrft.rollout.engines import get_engine

__all__ = ["Completion", "Request", "RolloutEngine", "SamplingParams", "get_engine"]
