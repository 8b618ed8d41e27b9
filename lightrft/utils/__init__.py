"""Helpers that the whole package uses. The public names load their home module on first use."""
from lightrft.utils.registry import lazy_exports

_HOMES = {
    "Timer": "lightrft.utils.timer",
    "add_arguments": "lightrft.utils.cli_args",
    "ensure_video_input_available": "lightrft.utils.lightrft_names",
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_exports(__name__, _HOMES)
