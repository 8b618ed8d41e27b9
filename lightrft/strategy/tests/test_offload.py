"""Moves between the device and host memory: what is on the device when, and which buffers hold the rest."""
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import optimizer as optimizers
from lightrft.strategy.optimizer import HostBuffers, MOMENTS
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.strategy_case import assert_same, Case
from lightrft.tests.support.tiny_lm import MICRO_BATCHES


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
    empty_like = torch.empty_like
    stream = type("Stream", (), {"synchronize": lambda self: waited.append(True)})

    def allocated(tensor: Tensor, device: str, pin_memory: bool) -> Tensor:
        asked.append((device, pin_memory))
        return empty_like(tensor.as_subclass(Tensor), device=device)  # pinning needs a GPU

    monkeypatch.setattr(torch, "empty_like", allocated)
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
    assert asked == [("cpu", True)] * 2 and waited == [True]
    assert len(addresses["a"]) == len(addresses["b"]) == 1 and addresses["a"] != addresses["b"]


def test_what_is_in_host_memory_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert HostBuffers().store("a", tensor) is tensor and optimizers.load(tensor, torch.device("cpu")) is tensor
