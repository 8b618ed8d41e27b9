"""Converts files and rows of any known schema to prompts and demonstrations, in a seeded, resumable order. The public
names load their home module on first use."""
from lightrft.utils.registry import lazy_exports

_HOMES = {name: "lightrft.datasets.prompts_dataset" for name in ("PromptDataset", "PromptDatasetVL", "PromptsDataset")}
__all__ = sorted(_HOMES)
__getattr__ = lazy_exports(__name__, _HOMES)
