"""For processes of tests alone, once it is imported: who searches for garbage searches what was made lately.

vLLM, when it starts and ends, and DeepSpeed, whenever it prepares a model, search all objects, of which most belong to
imported modules: half a second each time. vLLM also unfreezes what ``gc.freeze`` has hidden.
"""
import gc

_collect = gc.collect


def young(generation: int = 1) -> int:
    """``gc.collect``, but for the oldest objects."""
    return _collect(min(generation, 1))


gc.collect = young  # type: ignore[assignment]
