"""Choice of the rollout engine; each is imported only when it is chosen."""
from typing import Any

from lightrft.config.schema import RolloutConfig
from lightrft.rollout.engine import RolloutEngine
from lightrft.utils.errors import UserError


def get_engine(cfg: RolloutConfig, actor: Any, strategy: Any, tokenizer: Any, bf16: bool = False) -> RolloutEngine:
    """Build the engine ``cfg.engine_type`` for ``actor``, an :class:`~lightrft.models.actor_language.ActorLanguage`
    already placed by ``strategy``. Its weights are those of ``actor`` after the first ``sync_weights``.

    Raises:
        ValueError: there is no such engine.
    """
    if cfg.engine_type == "hf":
        from lightrft.rollout.hf.engine import build_hf_engine
        return build_hf_engine(cfg, actor, strategy.device, tokenizer, bf16)
    if cfg.engine_type == "vllm":
        from lightrft.rollout.vllm.engine import build_vllm_engine
        return build_vllm_engine(cfg, actor, strategy.device, tokenizer, bf16)
    if cfg.engine_type == "sglang":
        from lightrft.rollout.sglang.engine import build_sglang_engine
        return build_sglang_engine(cfg, actor, strategy.device, tokenizer, bf16)
    raise UserError(f"unknown engine_type {cfg.engine_type!r}; known: hf, vllm, sglang")
