"""Starts of vLLM that do not repeat in a process what one of them has done, for processes of tests, which have many.

A start searches all objects for garbage, six times, although most belong to imported modules: two seconds. And it puts
vLLM's kernels for a CPU into all imported modules, where those of the first start are: half a second.
"""
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_collect = gc.collect


def young(generation: int = 1) -> int:
    """``gc.collect``, but for the oldest objects."""
    return _collect(min(generation, 1))


@contextmanager
def quick_starts() -> Iterator[None]:
    """Context of starts and ends of vLLM; the first start of a process puts its kernels there."""
    from vllm.triton_utils import dispatcher
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", young)
        if dispatcher._registry:
            patch.setattr(dispatcher, "register_kernels", lambda overrides: None)
        yield
