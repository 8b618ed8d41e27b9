"""Models on packed sequences, for all modalities. The public names load their home module on first use."""
from lightrft.utils.registry import lazy_exports

_HOMES = {
    **dict.fromkeys(("ActorAL", "ActorLanguage", "ActorVL"), "lightrft.models.actor_language"),
    **dict.fromkeys(("GPTLMLoss", "PolicyLoss", "ValueLoss"), "lightrft.models.loss"),
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_exports(__name__, _HOMES)
