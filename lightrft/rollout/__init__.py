"""Rollout engines and the way weights reach them."""
from lightrft.rollout.engine import Completion, Continuation, Request, RolloutEngine, SamplingParams
from lightrft.rollout.engines import get_engine

__all__ = ["Completion", "Continuation", "Request", "RolloutEngine", "SamplingParams", "get_engine"]
