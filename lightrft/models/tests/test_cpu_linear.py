"""Linear layers computed by oneDNN: the same numbers as ``nn.Linear``, up to the rounding of sums in another order."""
import copy
import platform

import pytest
import torch
from torch import nn

from lightrft.models.cpu_linear import CPULinear, use_onednn

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(),
    reason="a GPU computes the layers, or another kind of CPU")


def layers(width: int = 96, out: int = 200, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(width, out, bias=bias, dtype=dtype)
    fast = nn.Sequential(copy.deepcopy(plain))
    use_onednn(fast)
    return [plain, fast[0]]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 300, 2500])  # under the least size; one part of the sum; three
def test_output_and_gradients_are_those_of_linear(rows: int, bias: bool) -> None:
    x, grad = torch.randn(1, rows, 96), torch.randn(1, rows, 200)
    found = []
    for layer in layers(bias=bias):
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.backward(grad)
        with torch.no_grad():
            assert torch.equal(layer(x), out), "another pass without gradients"
        found.append([out.detach(), inputs.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6 * rows**0.5 + 1e-6)


def test_it_computes_with_onednn() -> None:
    plain, fast = layers()
    with torch.profiler.profile() as profile:
        fast(torch.randn(300, 96, requires_grad=True)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "mkldnn::_linear_pointwise" in names and not names & {"aten::mm", "aten::addmm", "aten::linear"}, names
    assert type(fast) is CPULinear and type(plain) is nn.Linear


def test_other_precisions_and_frozen_weights_work() -> None:
    for plain, fast in (layers(dtype=torch.float64), layers(dtype=torch.bfloat16)):
        x = torch.randn(300, 96, dtype=plain.weight.dtype)
        assert torch.equal(fast(x), plain(x))
    _, fast = layers()
    x = torch.randn(300, 96, requires_grad=True)
    fast.requires_grad_(False)(x).sum().backward()
    assert fast.weight.grad is None and x.grad is not None
