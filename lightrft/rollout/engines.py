"""Choice of the rollout engine; each is imported only when it is chosen."""
from importlib import import_module
from typing import Any

from lightrft.config.engines import ENGINES
from lightrft.config.schema import RolloutConfig
from lightrft.rollout.engine import RolloutEngine
from lightrft.utils.errors import UserError


def get_engine(cfg: RolloutConfig, actor: Any, strategy: Any, tokenizer: Any, bf16: bool = False) -> RolloutEngine:
    """Build the engine ``cfg.engine_type`` for ``actor``, an :class:`~lightrft.models.actor_language.ActorLanguage`
    already placed by ``strategy``. Its weights are those of ``actor`` after the first ``sync_weights``.

    The engine NAME is built by ``build_NAME_engine`` of ``lightrft.rollout.NAME.engine``.

    Raises:
        ValueError: there is no such engine.
    """
    name = cfg.engine_type
    if name not in ENGINES:
        raise UserError(f"unknown engine_type {name!r}; known: {', '.join(ENGINES)}")
    build = getattr(import_module(f"lightrft.rollout.{name}.engine"), f"build_{name}_engine")
    return build(cfg, actor, strategy.device, tokenizer, bf16)
