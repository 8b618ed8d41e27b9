"""Moments in eight bits against their float32 values, and the option that chooses them."""
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.config.schema import Config, OptimConfig, StrategyConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build
from lightrft.preflight.validate import validate
from lightrft.strategy import eight_bit
from lightrft.strategy.eight_bit import block_size, decode_moment, encode_moment
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.fake_cuda import fake_cuda
from lightrft.tests.support.packages import needs_bitsandbytes
from lightrft.tests.support.strategy_case import Case
from lightrft.tests.support.tiny_lm import EIGHT_BIT

CODED = OptimConfig(optim="adamw_8bit")


@needs_bitsandbytes
@pytest.mark.parametrize("signed", [True, False])
def test_each_value_becomes_the_nearest_of_its_block(signed: bool) -> None:
    """Compared with a search over all 256 values; blocks of rows have scales of their own."""
    torch.manual_seed(0)
    moment = torch.randn(8, 3, 64) * torch.logspace(-9, 0, 24).view(8, 3, 1)  # a parameter of three dimensions
    moment = moment if signed else moment.square()
    moment[2] = 0.0
    codes, scales = encode_moment(moment, signed, 64)
    assert codes.dtype == torch.uint8 and codes.shape == moment.shape and scales.shape == (8, 3)
    assert torch.equal(scales, moment.abs().amax(-1))
    shares = (moment / scales.unsqueeze(-1)).nan_to_num()
    nearest = (shares.unsqueeze(-1) - eight_bit._code(signed, moment.device)).abs().amin(-1)
    off = (decode_moment(codes, scales, signed) - moment).abs() / scales.unsqueeze(-1)
    assert (off.nan_to_num() <= nearest + 1e-4).all() and not decode_moment(codes, scales, signed)[2].any()


@needs_bitsandbytes
def test_rows_are_encoded_the_same_on_any_number_of_ranks() -> None:
    moment = torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    size = block_size(moment.shape)
    codes, scales = encode_moment(moment, True, size)
    for first, last in ((0, 3), (3, 7), (7, 7)):
        part = encode_moment(moment[first:last], True, size)
        assert size == 64 and torch.equal(part[0], codes[first:last]) and torch.equal(part[1], scales[first:last])
        assert decode_moment(*part, True).shape == (last - first, 192)


def test_blocks_divide_rows() -> None:
    shapes = {(4096, 1024): 256, (10, 896): 128, (3, 64): 64, (16, 4, 16): 64, (64, 51): 0, (512, ): 0, (): 0}
    assert {shape: block_size(torch.Size(shape)) for shape in shapes} == shapes


def trained(spec: OptimSpec, steps: int) -> tuple[list[float], LocalOptimizer]:
    """Errors of a linear map that learns another one."""
    torch.manual_seed(0)
    goal, inputs, weight = torch.randn(48, 128), torch.randn(256, 128), torch.nn.Parameter(torch.zeros(48, 128))
    optimizer, errors = LocalOptimizer([("weight", weight)], spec), []
    for _ in range(steps):
        loss = (inputs @ (weight - goal).T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        errors.append(loss.item())
    return errors, optimizer


@needs_bitsandbytes
def test_it_learns_like_float32_with_a_quarter_of_the_state() -> None:
    spec = OptimSpec(lr=0.02)
    exact, plain = trained(spec, 150)
    errors, optimizer = trained(replace(spec, options=CODED), 150)
    assert errors[0] == exact[0] and exact[-1] < errors[0] / 100 and errors[-1] < errors[0] / 100
    held = {one: sum(value.nbytes for _, key, value in one.moments() if key != "step") for one in (plain, optimizer)}
    assert held[optimizer] < 0.27 * held[plain]


@needs_bitsandbytes
def test_host_memory_and_parts_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales of parts of another size, and with the moments in host memory, are the same."""
    states = []
    for offload, part in ((False, 256 << 20), (False, 10_000), (True, 10_000)):
        monkeypatch.setattr("lightrft.strategy.optimizer.STEP_BYTES", part)
        strategy = get_strategy(StrategyConfig(strategy="single", adam_offload=offload))
        strategy.setup()
        case = Case(strategy, tmp_path, EIGHT_BIT)
        prepared = case.prepare(hidden=64)
        case.train(prepared, range(3))
        states.append(case.state(prepared))
    assert states[0].keys() == states[1].keys() == states[2].keys()
    assert all(torch.equal(value, other[name]) for other in states[1:] for name, value in states[0].items())


@pytest.mark.parametrize("offloaded, device", [(False, "cuda"), (True, "cpu")])
def test_moments_rest_where_the_options_say(offloaded: bool, device: str) -> None:
    """Between steps codes and scales are on the device, and in host memory with ``--adam_offload`` alone, also when the
    weights have left the device and returned."""
    pytest.importorskip("bitsandbytes")  # its import looks for a real GPU
    with fake_cuda():
        weight = torch.nn.Parameter(torch.zeros(48, 128, device="cuda"))
        optimizer = LocalOptimizer([("weight", weight)], OptimSpec(0.02, CODED), offloaded)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        for moved, expected in ((lambda: None, device), (optimizer.offload, "cpu"), (optimizer.reload, device)):
            moved()
            assert {value.device.type for _, key, value in optimizer.moments() if key != "step"} == {expected}


@pytest.mark.parametrize("tree, data", [(Config, "prompt_data"), (SFTConfig, "train_data")])
def test_a_missing_package_is_named_before_the_run(tree, data, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build(tree, {"pretrain": "org/model", data: ["org/data"], "optim": "adamw_8bit"})
    monkeypatch.setattr("lightrft.preflight.shared_rules.find_spec", lambda name: name)
    validate(config, 2)
    monkeypatch.setattr("lightrft.preflight.shared_rules.find_spec", lambda name: None)
    validate(config, 2, planned=True)
    with pytest.raises(ValueError, match=r"--optim adamw_8bit: .*bitsandbytes is not installed; run: pip install -e"):
        validate(config, 2)
