"""Moves between the device and host memory: what is on the device when, and which buffers hold the rest."""
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn, Tensor

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import optimizer as optimizers
from lightrft.strategy.host_buffers import HostBuffers, SLAB_BYTES, Slabs, pinned
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.optimizers.adamw import MOMENTS
from lightrft.strategy.sharding import local
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.fake_cuda import DOWNLOAD, fake_cuda, KERNEL, SYNC, UPLOAD
from lightrft.tests.support.strategy_case import assert_same, Case
from lightrft.tests.support.tiny_lm import MICRO_BATCHES
from lightrft.trainer.frozen_model import FrozenModel
from lightrft.utils.errors import ExpectedError


class OnGpu(Tensor):
    """Host memory that says it is a GPU's."""
    device = torch.device("cuda", 0)
    __torch_function__ = torch._C._disabled_torch_function_impl


def case_of(folder: Path, **options: object) -> Case:
    strategy = get_strategy(StrategyConfig(strategy="single", **options))
    strategy.setup()
    return Case(strategy, folder)


def test_moments_are_on_the_device_only_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves are counted by the functions that move. A step brings some of the moments at a time, each of them once."""
    there: dict[int, int] = {}  # tensor -> bytes, of moments on the device
    seen: dict[str, list[int]] = {"forward": [], "backward": [], "step": [], "moved": []}
    load, store, update = optimizers.load, HostBuffers.store, torch.optim.AdamW.step

    def loaded(tensor: Tensor, device: torch.device) -> Tensor:
        there[id(tensor)] = tensor.nbytes
        seen["moved"].append(tensor.nbytes)
        return load(tensor, device)

    def stored(host: HostBuffers, key: object, tensor: Tensor) -> Tensor:
        there.pop(id(tensor), None)
        return store(host, key, tensor)

    def updated(self: torch.optim.AdamW, closure: None = None) -> None:
        seen["step"].append(sum(there.values()))
        update(self, closure)

    case, twin = case_of(tmp_path, adam_offload=True), case_of(tmp_path)
    prepared, plain = case.prepare(), twin.prepare()
    case.train(prepared, range(1))  # makes the moments
    twin.train(plain, range(1))
    monkeypatch.setattr(optimizers, "STEP_BYTES", 20_000)
    monkeypatch.setattr(optimizers, "load", loaded)
    monkeypatch.setattr(HostBuffers, "store", stored)
    monkeypatch.setattr(torch.optim.AdamW, "step", updated)
    prepared.model.register_forward_hook(lambda *_: seen["forward"].append(sum(there.values())))
    next(prepared.model.parameters()).register_hook(lambda _: seen["backward"].append(sum(there.values())))
    case.train(prepared, range(1, 3))
    monkeypatch.undo()
    twin.train(plain, range(1, 3))

    moments = sum(state[key].nbytes for state in prepared.optimizer.state.values() for key in MOMENTS)
    assert seen["forward"] == seen["backward"] == [0] * 2 * MICRO_BATCHES
    assert sum(seen["moved"]) == sum(seen["step"]) == 2 * moments, "each moment comes once per step"
    assert len(seen["step"]) > 6 and max(seen["step"]) < moments / 2
    assert_same(case.state(prepared), twin.state(plain))


def test_a_buffer_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned where there is CUDA, used again for the same key, and complete before the host reads it."""
    asked, waited = [], []
    empty = torch.empty
    stream = type("Stream", (), {"synchronize": lambda self: waited.append(True)})

    def allocated(nbytes: int, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        asked.append(pin_memory)
        return empty(nbytes, dtype=dtype)  # pinning needs a GPU

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    host, addresses = HostBuffers(), {"a": set(), "b": set()}
    host.wait()
    assert not waited, "nothing was copied"
    for value in range(3):
        for key, found in addresses.items():
            tensor = torch.full((3, 2), float(value)).as_subclass(OnGpu)
            kept = host.store(key, tensor)
            assert kept.device.type == "cpu" and torch.equal(kept, torch.full((3, 2), float(value)))
            found.add(kept.data_ptr())
            assert kept.data_ptr() != tensor.data_ptr()
    host.wait()
    assert asked == [True] * 2 and waited == [True]
    assert len(addresses["a"]) == len(addresses["b"]) == 1 and addresses["a"] != addresses["b"]


def test_what_is_in_host_memory_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert HostBuffers().store("a", tensor) is tensor and optimizers.load(tensor, torch.device("cpu")) is tensor


def test_the_host_waits_for_what_it_may_read_at_once() -> None:
    """A copy to the device is queued; one to host memory, as of a module's buffer, has arrived."""
    with fake_cuda() as ledger:
        there = optimizers.load(torch.ones(3), torch.device("cuda"))
        assert there.is_cuda and ledger.total(SYNC) == 0
        optimizers.load(there, torch.device("cpu"))
        assert ledger.total(DOWNLOAD) == 0 and ledger.total(SYNC) == 1


def test_pinned_buffers_take_little_more_than_the_tensors() -> None:
    """torch pins powers of two: each of these moments in a buffer of its own would take 1.9 times their size."""
    sizes = 2 * [152064, *[3584, 512, 512, 3584, 18944, 18944, 18944] * 28, 152064]  # rows of Qwen2.5-7B, of 14 KiB
    taken: list[int] = []
    slabs = Slabs(lambda nbytes: taken.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    for rows in sizes:
        assert slabs.like(torch.empty(rows, 3584, device="meta")).shape == (rows, 3584)
    moments, alone = 14336 * sum(sizes), sum(1 << (14336 * rows - 1).bit_length() for rows in sizes)
    assert all(nbytes & (nbytes - 1) == 0 for nbytes in taken), "torch rounds others up"
    assert moments <= sum(taken) <= 1.1 * moments and alone > 1.8 * moments


def test_a_large_tensor_takes_its_own_size() -> None:
    """As the flat weights of ZeRO-1 do: a power of two above 4 GiB would be up to twice as much."""
    taken: list[int] = []
    slabs = Slabs(lambda nbytes: taken.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    sizes = [SLAB_BYTES + 512, 9 << 30, SLAB_BYTES]
    for nbytes in sizes:
        slabs.like(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    assert taken == sizes


def mapped(address: int) -> bool:
    """If memory of this process is mapped at ``address``."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in ranges)


def test_other_sizes_than_powers_of_two_are_pinned_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """By CUDA's own call, which has not run here; the memory is released with the last tensor that uses it."""
    calls: list[tuple[object, ...]] = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *args: calls.append(args) or int(args[1] == 12288),
                             cudaHostUnregister=lambda start: calls.append((start, mapped(start))))  # yapf: disable
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = pinned(5000)
    view = memory[1000:2000].view(torch.float32).fill_(1.0)
    address = memory.data_ptr()
    del memory
    assert view.sum() == 250 and calls == [(address, 5000, 1)]
    del view
    assert calls == [(address, 5000, 1), (address, True)], "a mapping that has gone could be another's by now"
    assert not mapped(address)
    with pytest.raises(ExpectedError, match="cannot be pinned .CUDA error 1.: .* without --adam_offload"):
        pinned(12288)


def test_buffers_of_one_slab_do_not_overlap() -> None:
    slabs = Slabs()
    tensors = [torch.rand(size) for size in ((3, 5), (1000, ), (), (0, 4), (7, 300))] + [torch.arange(9)]
    buffers = [slabs.like(tensor).copy_(tensor) for tensor in tensors]
    assert all(torch.equal(buffer, tensor) for buffer, tensor in zip(buffers, tensors))


@pytest.mark.parametrize("name", ["single", "fsdp"])
def test_a_frozen_model_leaves_the_device_without_a_copy(name: str) -> None:
    """After the first time the host has its weights, in the same memory; a trained one has changed."""
    with fake_cuda() as ledger:
        strategy = get_strategy(StrategyConfig(strategy=name))
        strategy.setup()
        frozen, spec = FrozenModel(nn.Linear(64, 8), strategy, 0, True), OptimSpec(1e-2)
        expected, uploads = frozen.prepared.model.weight.detach().clone(), []
        for _ in range(2):
            before = *map(ledger.total, (DOWNLOAD, SYNC, KERNEL)), ledger.total(UPLOAD)
            with frozen.here() as model:
                assert model.weight.is_cuda
            assert (*map(ledger.total, (DOWNLOAD, SYNC, KERNEL)), ) == before[:3]
            uploads.append(ledger.total(UPLOAD) - before[3])
            assert not model.weight.is_cuda and torch.equal(local(model.weight), local(expected))
        assert uploads == [2, 2], "weight and bias"
        trained = strategy.prepare(nn.Linear(64, 8), spec)
        strategy.offload(trained)
        strategy.reload(trained)
        before = ledger.total(DOWNLOAD)
        strategy.offload(trained)
        assert ledger.total(DOWNLOAD) - before == 2
        strategy.teardown()
