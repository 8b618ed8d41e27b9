"""Parts of the vLLM engine that only CUDA needs: its stream and the memory of its sleep, with stand-ins for CUDA's."""
import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightrft.rollout.vllm.engine import keep_unmapped_pools
from lightrft.rollout.vllm.parts import VLLMParts
from lightrft.rollout.vllm.launch import NativeStream

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


class Streams:
    """The current stream of a thread, and what waits for what."""

    def __init__(self, monkeypatch):
        self.now, self.waits = self.stream("trainer"), []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    def stream(self, name):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.waits.append((name, other.name)))

    @contextmanager
    def entered(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def test_the_trainer_keeps_its_stream_and_vllm_its_own(streams):
    """As with tensor parallelism, vLLM replaces the current stream while it starts."""
    native, trainer, own = NativeStream(), streams.now, streams.stream("vllm")
    with native.entered():
        assert streams.now is trainer
        streams.now = own
    assert streams.now is trainer and streams.waits == [("trainer", "vllm")]
    with pytest.raises(KeyError), native.entered():
        assert streams.now is own and streams.waits.pop() == ("vllm", "trainer")
        raise KeyError
    assert streams.now is trainer and streams.waits == [("trainer", "vllm")] * 2


def test_a_stream_that_vllm_leaves_alone_waits_for_nothing(streams):
    native = NativeStream()
    for _ in range(2):
        with native.entered():
            pass
    assert streams.waits == []


def test_without_cuda_no_stream_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: pytest.fail("asked for"))
    with NativeStream().entered():
        pass


def test_steps_run_on_the_stream_of_vllm_and_all_else_on_the_trainers(streams, monkeypatch):
    monkeypatch.setattr("lightrft.rollout.vllm.parts._generators_kept", nullcontext)
    native, own, seen = NativeStream(), streams.stream("vllm"), []
    with native.entered():
        streams.now = own

    def step():
        seen.append(streams.now.name)
        return []

    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(running=[])))
    engine = SimpleNamespace(step=step, engine_core=core)
    assert VLLMParts(engine, None, stream=native).round([], False) == []
    assert seen == ["vllm"] and streams.now.name == "trainer"


class Pool:
    """A pool of torch: at its end it frees every address, and vLLM unmaps it."""

    def __init__(self, allocator, addresses, freed):
        self.allocator, self.addresses, self.freed = allocator, addresses, freed

    def __del__(self):
        self.freed += [(one, self.allocator._python_free_callback(one)) for one in self.addresses]


def test_the_end_does_not_unmap_what_sleeps(monkeypatch):
    """At the end of a run the weights are awake and the cache sleeps. Then a second engine may start: vLLM asks for
    an allocator that has no memory."""
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    allocator, freed = CuMemAllocator(), []
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    for tag, addresses in (("weights", [1, 2]), ("kv_cache", [3, 4])):
        allocator.pointer_to_data |= {one: AllocationData((0, 8, one, 0), tag, None, one > 2) for one in addresses}
        allocator.allocator_and_pools[tag] = [(Pool(allocator, addresses, freed), object())]
    keep_unmapped_pools()
    allocator.release_pools()
    gc.collect()
    assert [address for address, _ in freed] == [1, 2], "the cache was unmapped before"
    assert allocator.get_current_usage() == 0


def test_an_end_without_sleep(monkeypatch):
    from vllm.device_allocator.cumem import CuMemAllocator
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    keep_unmapped_pools()
