"""Linear layers computed by oneDNN: the same numbers as ``nn.Linear``, up to the rounding of sums in another order."""
import copy
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightrft.models import cpu_layers
from lightrft.models.cpu_layers import CPULinear, packed_weights, use_onednn

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(),
    reason="a GPU computes the layers, or another kind of CPU")
VENDOR = cpu_layers._vendor


@pytest.fixture(autouse=True)
def another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layers, "_vendor", lambda: "AuthenticAMD")


def test_the_maker_of_the_cpu_is_known() -> None:
    known = cpu_layers.Path("/proc/cpuinfo")
    assert not known.exists() or VENDOR() and f": {VENDOR()}\n" in known.read_text()


def test_products_of_intels_cpus_are_those_of_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    for mkl, expected in ((True, nn.Linear), (False, CPULinear)):
        monkeypatch.setattr(cpu_layers, "_vendor", lambda: "GenuineIntel")
        monkeypatch.setattr("torch.backends.mkl.is_available", lambda mkl=mkl: mkl)
        assert type(layers()[1]) is expected


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
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=4e-6 * rows**0.5 + 1e-6)


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


def test_packed_weights_give_the_same_numbers_without_a_copy_of_the_weight_per_product() -> None:
    layer = layers(96, 700)[1]
    x = torch.randn(100, 96)
    with torch.no_grad():
        expected = layer(x)
        with packed_weights(nn.Sequential(layer)), torch.profiler.profile() as profile:
            assert layer.packed is not None and layer.packed.is_mkldnn
            torch.testing.assert_close(layer(x), expected)
    assert layer.packed is None
    assert "mkldnn::_linear_pointwise" in {event.key for event in profile.key_averages()}


def test_weights_that_change_are_packed_again_and_errors_leave_none_packed() -> None:
    plain, layer = layers(96, 700)
    x = torch.randn(100, 96)
    for factor in (1.0, 2.0):
        with torch.no_grad(), packed_weights(layer):
            torch.testing.assert_close(layer(x), factor * (plain(x) - plain.bias) + plain.bias, rtol=1e-4, atol=1e-5)
        layer.weight.data *= 2
    with pytest.raises(ZeroDivisionError), packed_weights(layer):
        1 / 0
    assert layer.packed is None


def test_large_models_and_other_precisions_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    half, single = layers(dtype=torch.bfloat16)[1], layers()[1]
    with packed_weights(half):
        assert half.packed is None
    monkeypatch.setattr("lightrft.models.cpu_layers._PACKED_MOST", single.weight.nbytes - 1)
    with packed_weights(single):
        assert single.packed is None


def test_few_kernels_are_kept_unless_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = cpu_layers._CAPACITIES
    monkeypatch.setenv(one, "7")
    monkeypatch.delenv(other, raising=False)
    seen = []
    monkeypatch.setattr(cpu_layers, "_product", lambda *args: seen.append((os.environ[one], os.environ[other])))
    use_onednn(nn.Linear(2, 2))
    assert seen == [("7", "128")] and os.environ[one] == "7" and other not in os.environ


MEASURE = """
import torch
from lightrft.models import cpu_layers
from lightrft.models.cpu_layers import _product, use_onednn
from lightrft.utils.env import used_memory_gib
cpu_layers._vendor = lambda: "AuthenticAMD"
use_onednn(torch.nn.Linear(2, 2))
weight, before = torch.randn(512, 128), used_memory_gib(torch.device("cpu"))
for rows in range(100, 1100):
    _product(torch.randn(rows, 128), weight)
print(used_memory_gib(torch.device("cpu")) - before)
"""


def test_memory_does_not_grow_with_the_numbers_of_rows() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5  # 1,000 kernels take 0.7 GiB, and 128 of them 0.1 to 0.3


def test_gradients_are_ready_in_one_order_whatever_the_number_of_tokens():
    """ZeRO-1 and 2 add what is ready first on one rank to what is ready first on another."""
    orders = []
    for tokens in (1, 4096):
        model, order = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), []
        use_onednn(model)
        for name, weight in model.named_parameters():
            weight.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        model(torch.ones(1, tokens, 64)).sum().backward()
        orders.append(order)
    assert orders[0] == orders[1] and len(orders[0]) == 4
