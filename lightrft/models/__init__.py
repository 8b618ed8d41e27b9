"""Models on packed sequences, for all modalities. The public names load their home module on first use."""
from lightrft.utils.registry import lazy_exports

_HOMES = {name: "lightrft.models.actor_language" for name in ("ActorAL", "ActorLanguage", "ActorVL")}
__all__ = sorted(_HOMES)
__getattr__ = lazy_exports(__name__, _HOMES)
